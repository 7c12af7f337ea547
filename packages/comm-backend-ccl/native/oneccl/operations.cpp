#include "oneccl/operations.hpp"

#include "oneccl/library.hpp"

#include <stdexcept>
#include <string>

namespace oneccl {

namespace {

ccl::event start(const Group &group, const Call &call) {
    const ccl::communicator &on = *group.communicator;
    const auto [operation, input, output, count, input_counts, output_counts, dtype_code, op_code, peer] = call;
    const auto dtype = static_cast<ccl::datatype>(dtype_code);
    const auto op = static_cast<ccl::reduction>(op_code);
    const auto ranks = static_cast<size_t>(group.size);
    void *in_place = const_cast<void *>(input);
    switch (operation) {
    case all_reduce:
        return ccl::allreduce(input, output, count, dtype, op, on);
    case reduce:
        return ccl::reduce(input, output, count, dtype, op, peer, on);
    case broadcast:
        return ccl::broadcast(output, count, dtype, peer, on);
    case all_gather: {
        const ccl::vector_class<size_t> counts(ranks, count);
        return ccl::allgatherv(input, count, output, counts, dtype, on);
    }
    case reduce_scatter:
        return ccl::reduce_scatter(input, output, count, dtype, op, on);
    case all_to_all:
        return ccl::alltoall(input, output, count, dtype, on);
    case all_to_all_v: {
        const ccl::vector_class<size_t> sent(input_counts, input_counts + ranks);
        const ccl::vector_class<size_t> received(output_counts, output_counts + ranks);
        return ccl::alltoallv(input, sent, output, received, dtype, on);
    }
    case send:
        return ccl::send(in_place, count, dtype, peer, on);
    case receive:
        return ccl::recv(output, count, dtype, peer, on);
    default:
        throw std::invalid_argument("unknown operation " + std::to_string(operation));
    }
}

}  // namespace

void begin(Request &request, const Group &group, const Call &call) {
    const LibraryLock held;
    if (stopped) {
        throw std::runtime_error("the process is ending");
    }
    if (!group.communicator) {
        throw std::runtime_error("the group was destroyed");
    }
    request.on = group.communicator;
    request.event = start(group, call);
    under_way.fetch_add(1, std::memory_order_relaxed);
    request.test_locked();
}

}  // namespace oneccl
