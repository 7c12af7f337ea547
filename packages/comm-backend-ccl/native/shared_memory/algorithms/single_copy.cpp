#include "algorithms/single_copy.hpp"

#include "segment/peer_memory.hpp"

#include <cerrno>

namespace shm {

namespace {

class Reader {
public:
    Reader(Group &group, const Operands &operands, uint64_t number)
        : group_(group), operands_(operands), number_(number) {}

    void read(int rank, char *to, uint64_t address, size_t bytes) const {
        if (bytes > 0 && !group_.broken() && !read_peer(group_.pid(rank), to, address, bytes)) {
            group_.fail_to_reach(errno, rank, number_);
        }
    }
    // From byte `offset` of its input.
    void read_input(int rank, char *to, size_t offset, size_t bytes) const {
        read(rank, to, group_.record_of(rank, number_).input_address + offset, bytes);
    }
    void read_output(int rank, char *to, size_t offset, size_t bytes) const {
        read(rank, to, group_.record_of(rank, number_).output_address + offset, bytes);
    }
    // All ranks' bytes from `offset` of their inputs, reduced into `output`.
    void reduce(char *output, size_t offset, size_t bytes) const {
        constexpr size_t most = Tuner::scratch_bytes;
        for (size_t at = 0; at < bytes && !group_.broken(); at += most) {
            const size_t part = std::min(most, bytes - at);
            for (const int from : group_.reading_order()) {
                read_input(from, group_.scratch(from), offset + at, part);
            }
            operands_.reduce_from(
                [&](int one) -> const void * {
                    return one == operands_.me ? operands_.input() + offset + at : group_.scratch(one);
                },
                output + at, part / operands_.item);
        }
    }

private:
    Group &group_;
    const Operands &operands_;
    const uint64_t number_;
};

}  // namespace

bool SingleCopy::serves(Group &group, const Operands &operands, uint64_t number) {
    if (operands.request.operation != all_to_all && operands.request.operation != all_to_all_v) {
        return true;
    }
    // Ranks would read what others have overwritten.
    for (int one = 0; one < operands.size; ++one) {
        const Record &record = group.record_of(one, number);
        if (record.input_address == record.output_address) {
            return false;
        }
    }
    return true;
}

void SingleCopy::act(Group &group, const Operands &operands, const Range &range, uint64_t number, uint32_t step) {
    const Request &request = operands.request;
    const Reader reader(group, operands, number);
    const int me = operands.me;
    const size_t item = operands.item, begin = range.begin, bytes = range.end - range.begin;
    // Of each rank, where its part of a tensor begins.
    const auto part = [&](int rank) { return static_cast<size_t>(rank) * operands.total() + begin; };
    char *output = operands.output();
    const auto slice = [&](int rank) { return operands.slice_of(bytes / item, rank); };
    switch (request.operation) {
    case all_reduce:
        if (step == 1) {
            const size_t at = begin + slice(me).begin * item;
            reader.reduce(output + at, at, slice(me).count * item);
            break;
        }
        for (const int from : group.reading_order()) {
            const size_t at = begin + slice(from).begin * item;
            reader.read_output(from, output + at, at, slice(from).count * item);
        }
        break;
    case shm::reduce:
        if (operands.is_root()) {
            reader.reduce(output + begin, begin, bytes);
        }
        break;
    case reduce_scatter:
        reader.reduce(output + begin, part(me), bytes);
        break;
    case broadcast:
        if (!operands.is_root()) {
            reader.read_input(request.root, output + begin, begin, bytes);
        }
        break;
    case scatter:
        if (operands.is_root()) {
            operands.copy(output + begin, operands.input() + part(me), bytes);
        } else {
            reader.read_input(request.root, output + begin, part(me), bytes);
        }
        break;
    case gather:
        if (!operands.is_root()) {
            break;
        }
        [[fallthrough]];
    case all_gather:
        if (output + part(me) != operands.input() + begin) {
            operands.copy(output + part(me), operands.input() + begin, bytes);
        }
        for (const int from : group.reading_order()) {
            reader.read_input(from, output + part(from), begin, bytes);
        }
        break;
    case all_to_all:
        operands.copy(output + part(me), operands.input() + part(me), bytes);
        for (const int from : group.reading_order()) {
            reader.read_input(from, output + part(from), part(me), bytes);
        }
        break;
    case all_to_all_v: {
        const auto within = [&](size_t whole) { return std::min(whole, range.end) - std::min(whole, begin); };
        if (const size_t own = within(request.output_counts[me] * item); own > 0) {
            operands.copy(output + operands.output_offsets[me] + begin,
                          operands.input() + operands.input_offsets[me] + begin, own);
        }
        for (const int from : group.reading_order()) {
            size_t offset = 0;
            for (int before = 0; before < me; ++before) {
                offset += group.sizes_of(from, number)[before];
            }
            if (const size_t theirs = within(request.output_counts[from] * item); theirs > 0) {
                reader.read_input(from, output + operands.output_offsets[from] + begin, offset + begin, theirs);
            }
        }
        break;
    }
    default:
        break;
    }
}

}  // namespace shm
