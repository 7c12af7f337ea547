// Operations in steps, of which each may wait for other ranks.

#pragma once

#include "progress/group.hpp"

namespace shm {

class Stepwise : public Task {
public:
    using Task::Task;
    bool advance(Group &group) final;

protected:
    // Says who is waited for before step `step`; a step below `posts_` is followed by a post.
    virtual bool ready(Group &group, uint32_t step) = 0;
    virtual void act(Group &group, uint32_t step) = 0;
    // Says how the operation moves its data, before it has begun; returns the method's code, or 0.
    virtual uint8_t choose(Group &group) {
        group.choose_usual_method();
        return 0;
    }
    virtual void prepare(Group &, Record &) {}
    bool all_at(Group &group, uint32_t steps);
    bool one_at(Group &group, int rank, uint32_t steps);

    Call call_;
    uint32_t base_ = 0, next_ = 0, steps_ = 0, posts_ = 0;
    bool begun_ = false;
};

}  // namespace shm
