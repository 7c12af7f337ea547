// Groups, and the start of operations on them.

#pragma once

#include "oneccl/request.hpp"

#include <cstddef>

namespace oneccl {

struct Group {
    Communicator communicator;
    int size;
};

enum Operation { all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, all_to_all_v, send, receive };

// The arguments of an operation; counts are of elements.
struct Call {
    int operation;
    const void *input;
    void *output;
    size_t count;
    const size_t *input_counts, *output_counts;  // of exchanges in parts of any size, for each rank
    int dtype, op, peer;
};

// Throws where it cannot be started.
void begin(Request &request, const Group &group, const Call &call);

}  // namespace oneccl
