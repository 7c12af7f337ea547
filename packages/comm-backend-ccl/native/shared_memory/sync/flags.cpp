// The words of a group: what this rank has done, and whether others have come so far. Every word is written with
// release and read with acquire, so that what was written before it is seen with it on processors that reorder memory
// as well.

#include "progress/group.hpp"

#include <algorithm>

namespace shm {

void Group::post(uint32_t fingerprint) {
    ++done_;
    ++steps_;
    posted_[done_ % records] = fingerprint;
    // An exchange is a full fence: whoever falls asleep sees this word, or is seen in `sleeping`.
    const uint64_t word = static_cast<uint64_t>(fingerprint) << 32 | done_;
    posts_[rank_].word.exchange(word, std::memory_order_seq_cst);
    if (header_->sleeping.load(std::memory_order_seq_cst) & ~(uint64_t{1} << rank_)) {
        wake_sleepers();
    }
}

bool Group::look_for_slowest(uint32_t needed) {
    uint32_t slowest = done_;
    for (int other = 0; other < size(); ++other) {
        const uint64_t seen = word(other).load(std::memory_order_acquire);
        const uint32_t steps = static_cast<uint32_t>(seen);
        if (other == rank_ || static_cast<int32_t>(steps - slowest) >= 0) {
            continue;
        }
        slowest = steps;
        // A rank that others never have to wait for learns here that it called something else.
        if (steps != 0 && done_ - steps < records && static_cast<uint32_t>(seen >> 32) != posted_[steps % records]) {
            fail(different_calls, other, number_);
        }
    }
    slowest_ = slowest;
    return static_cast<int32_t>(slowest - needed) >= 0;
}

bool Group::pieces_are_free(uint32_t first, uint32_t count, uint32_t &needed) {
    uint64_t last = 0;
    for (uint32_t index = first; index < first + count; ++index) {
        last = std::max(last, published_at_[index]);
    }
    if (steps_ - last >= slots) {
        return true;  // nobody is so far behind
    }
    needed = done_ - static_cast<uint32_t>(steps_ - last) + 3;
    return static_cast<int32_t>(slowest_ - needed) >= 0 || look_for_slowest(needed);
}

bool Group::has_come(int other, uint32_t steps, const Call &call, uint32_t begun) {
    const uint64_t seen = word(other).load(std::memory_order_acquire);
    const uint32_t posted = static_cast<uint32_t>(seen);
    if (static_cast<uint32_t>(seen >> 32) == call.fingerprint) {
        return static_cast<int32_t>(posted - steps) >= 0;
    }
    if (static_cast<int32_t>(posted - begun) <= 0) {
        return false;  // in an earlier operation
    }
    // In a later one, or in another than ours.
    const Call &theirs = record_of(other, call.number).call;
    if (theirs.number == call.number && theirs.fingerprint == call.fingerprint) {
        return true;
    }
    fail(different_calls, other, call.number);
    return false;
}

bool Group::all_have_come(uint32_t steps, const Call &call, uint32_t begun) {
    for (int other = 0; other < size(); ++other) {
        if (other != rank_ && !has_come(other, steps, call, begun)) {
            return false;
        }
    }
    return true;
}

}  // namespace shm
