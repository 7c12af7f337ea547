// With one copy out of the peers' own memory, by the kernel: ranks show where their tensors are, and read each other's.

#pragma once

#include "algorithms/operands.hpp"

namespace shm {

class SingleCopy {
public:
    // Whether it serves the operation, as every rank finds alike.
    static bool serves(Group &group, const Operands &operands, uint64_t number);
    // Of an all_reduce, each rank reduces a slice in the first step, and reads the others' in the second.
    static uint32_t steps(const Operands &operands) { return operands.request.operation == all_reduce ? 4 : 3; }
    static uint32_t posts(const Operands &operands) { return steps(operands) - 1; }
    static void act(Group &group, const Operands &operands, const Range &range, uint64_t number, uint32_t step);
};

}  // namespace shm
