#include "algorithms/zero_copy.hpp"

#include <algorithm>
#include <cstring>

namespace shm {

namespace {

// Of a slice that is reduced between two looks for a failure.
constexpr size_t part_bytes = size_t{1} << 20;

}  // namespace

bool ZeroCopy::plan(Group &group, const Operands &operands, uint64_t number) {
    const auto is_hidden = [&](int rank) { return group.record_of(rank, number).input.inode == 0; };
    switch (operands.request.operation) {
    case broadcast:
        if (is_hidden(operands.request.root)) {
            return false;
        }
        if (!operands.is_root()) {
            reach(group, operands.request.root, number);
        }
        return true;
    case all_reduce:
    case all_gather:
    case reduce_scatter:
    case all_to_all:
    case all_to_all_v:
        for (int one = 0; one < operands.size; ++one) {
            if (is_hidden(one)) {
                return false;
            }
        }
        for (int one = 0; one < operands.size; ++one) {
            if (one != operands.me) {
                reach(group, one, number);
            }
            for (int before = 0; operands.request.operation == all_to_all_v && before < operands.me; ++before) {
                offsets_[one] += group.sizes_of(one, number)[before];
            }
        }
        return true;
    default:
        return false;
    }
}

void ZeroCopy::reach(Group &group, int rank, uint64_t number) {
    int error = 0;
    tensors_[rank] = group.mapped(rank, group.record_of(rank, number).input, error);
    if (tensors_[rank] == nullptr) {
        group.fail_to_reach(error, rank, number);
    }
}

void ZeroCopy::act(const Group &group, const Operands &operands) {
    const Request &request = operands.request;
    const int me = operands.me;
    const size_t bytes = operands.total(), item = operands.item;
    char *output = operands.output();
    tensors_[me] = const_cast<char *>(operands.input());
    switch (request.operation) {
    case broadcast:
        if (!operands.is_root()) {
            operands.copy(output, tensors_[request.root], bytes);
        }
        break;
    case all_gather:
        if (output + static_cast<size_t>(me) * bytes != operands.input()) {
            std::memmove(output + static_cast<size_t>(me) * bytes, operands.input(), bytes);
        }
        for (const int from : group.reading_order()) {
            operands.copy(output + static_cast<size_t>(from) * bytes, tensors_[from], bytes);
        }
        break;
    case all_to_all:
        operands.copy(output + static_cast<size_t>(me) * bytes, tensors_[me] + static_cast<size_t>(me) * bytes, bytes);
        for (const int from : group.reading_order()) {
            operands.copy(output + static_cast<size_t>(from) * bytes, tensors_[from] + static_cast<size_t>(me) * bytes,
                          bytes);
        }
        break;
    case all_to_all_v:
        operands.copy(output + operands.output_offsets[me], tensors_[me] + offsets_[me],
                      request.output_counts[me] * item);
        for (const int from : group.reading_order()) {
            operands.copy(output + operands.output_offsets[from], tensors_[from] + offsets_[from],
                          request.output_counts[from] * item);
        }
        break;
    case reduce_scatter:
        operands.reduce_from([&](int one) { return tensors_[one] + static_cast<size_t>(me) * bytes; }, output,
                             request.count);
        break;
    case all_reduce: {
        // In parts: after a failure the others' tensors are theirs again.
        const Slice mine = operands.slice_of(request.count, me);
        const size_t most = part_bytes / item;
        for (size_t done = 0; done < mine.count && !group.broken(); done += most) {
            const size_t at = (mine.begin + done) * item;
            void *outputs[max_ranks] = {tensors_[me] + at};
            int count = 1;
            for (const int to : group.reading_order()) {
                outputs[count++] = tensors_[to] + at;
            }
            operands.reduce_from([&](int one) { return tensors_[one] + at; }, outputs, count,
                                 std::min(most, mine.count - done));
        }
        break;
    }
    default:
        break;
    }
}

}  // namespace shm
