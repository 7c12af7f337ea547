// An operation on more than fits into a slot. Large tensors that all ranks have in shared memory are used in place, as
// all find in the records that go with the first step. Of others the group's tuner says how they are moved: of the
// largest, segment by segment, so that a call of 50 ms uses what its first milliseconds have taught.

#pragma once

#include "algorithms/pipelined.hpp"
#include "algorithms/single_copy.hpp"
#include "algorithms/stepwise.hpp"
#include "algorithms/zero_copy.hpp"

namespace shm {

class Large final : public Stepwise {
public:
    // `is_chosen`: the group's method is that of this operation already.
    Large(Group &group, Request request, bool is_chosen = false);
    // An all_to_all_v whose sizes were shown at step `base`, and its part published, in a slot or in pieces from
    // `first`.
    Large(Group &group, Request request, const Call &call, uint32_t base, uint32_t first);

private:
    uint8_t choose(Group &group) override;
    void prepare(Group &group, Record &record) override;
    bool ready(Group &group, uint32_t step) override;
    void act(Group &group, uint32_t step) override;
    bool needed(Group &group, uint32_t steps);
    bool needed_by_readers(Group &group, uint32_t step);
    bool plan(Group &group);
    void plan_segment(Group &group);
    void begin_next_segment(Group &group, uint32_t step);
    bool segment_agrees(Group &group);
    bool sizes_agree(Group &group);

    enum Way : uint8_t { undecided, eager, in_place, in_chunks, read };

    Operands operands_;
    const bool is_small_, is_chosen_;
    Way way_ = undecided;
    uint32_t pieces_ = 0, first_ = 0;  // of the ring, where it is eager
    size_t bytes_ = 0;                 // of each rank, as the tuner counts them
    size_t whole_ = 0;                 // bytes of the longest part
    size_t segments_ = 1, segment_ = 0;
    uint32_t origin_ = 0;  // the step before the first one of the segment
    Range range_{};
    ZeroCopy zero_copy_;
    Pipelined pipelined_;
};

}  // namespace shm
