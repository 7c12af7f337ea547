#include "algorithms/stepwise.hpp"

namespace shm {

bool Stepwise::advance(Group &group) {
    if (!begun_) {
        begun_ = true;
        base_ = group.done();
        const uint8_t method = choose(group);
        if (passed) {
            group.pass(*passed);
        }
        Record &record = group.begin(request, call_, method);
        prepare(group, record);
    }
    while (next_ < steps_) {
        awaits = 0;
        const uint32_t step = base_ + next_;
        if (next_ < posts_ && !group.free_at(step)) {
            awaits = step - slots + 3;
            return false;
        }
        if (!ready(group, next_)) {
            return false;
        }
        act(group, next_);
        if (next_ < posts_) {
            group.post(call_.fingerprint);
        }
        ++next_;
    }
    return true;
}

bool Stepwise::all_at(Group &group, uint32_t steps) {
    awaits = base_ + steps;
    return group.all_have_come(base_ + steps, call_, base_);
}

bool Stepwise::one_at(Group &group, int rank, uint32_t steps) {
    awaits = 0;
    awaited_rank = rank;
    return group.has_come(rank, base_ + steps, call_, base_);
}

}  // namespace shm
