// On the tensors themselves, where those of all ranks can be mapped: three steps, of which the second does everything.

#pragma once

#include "algorithms/operands.hpp"

namespace shm {

class ZeroCopy {
public:
    // Whether it serves the operation, as every rank finds alike; then everybody's tensor is mapped, or the group
    // fails.
    bool plan(Group &group, const Operands &operands, uint64_t number);
    void act(const Group &group, const Operands &operands);

    static constexpr uint32_t steps = 3, posts = 2;

private:
    void reach(Group &group, int rank, uint64_t number);

    std::array<char *, max_ranks> tensors_{};
    std::array<size_t, max_ranks> offsets_{};  // bytes, of all_to_all_v: where what is for this rank begins
};

}  // namespace shm
