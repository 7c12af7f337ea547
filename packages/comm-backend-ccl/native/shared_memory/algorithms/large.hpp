// An operation on more than fits into a slot: on the tensors themselves where all ranks have them in shared memory,
// else in chunks. Which of the two it is, all ranks find in the records that go with the first step.

#pragma once

#include "algorithms/pipelined.hpp"
#include "algorithms/stepwise.hpp"
#include "algorithms/zero_copy.hpp"

namespace shm {

class Large final : public Stepwise {
public:
    Large(Group &group, Request request);

private:
    void prepare(Group &group, Record &record) override;
    bool ready(Group &group, uint32_t step) override;
    void act(Group &group, uint32_t step) override;
    bool needed(Group &group, uint32_t steps);
    bool plan(Group &group);
    bool sizes_agree(Group &group);

    enum Way : uint8_t { undecided, zero_copy, pipelined };

    Operands operands_;
    Way way_ = undecided;
    ZeroCopy zero_copy_;
    Pipelined pipelined_;
};

}  // namespace shm
