// The tensors of an operation that is too large for a slot, and what all ways of doing it do with them.

#pragma once

#include "algorithms/eager.hpp"
#include "kernels/kernels.hpp"
#include "progress/group.hpp"

#include <algorithm>
#include <array>

namespace shm {

constexpr size_t alignment = 64;
constexpr size_t rounded_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

struct Slice {
    size_t begin, count;  // elements
};

// Bytes of the tensor that is cut into chunks, or of each of its parts.
struct Range {
    size_t begin, end;
};

struct Operands {
    Operands(Group &group, const Request &request)
        : request(request), size(group.size()), me(group.rank()), item(item_bytes(request.dtype)), group_(group) {
        // Where input and output together leave the cache before anybody reads them; what is reduced in place was read
        // a moment ago.
        const bool reduces_in_place = request.operation == all_reduce || request.operation == shm::reduce;
        const bool has_input = request.operation != broadcast && (request.operation != scatter || is_root());
        const size_t own_bytes = output_bytes() + (has_input ? input_bytes(group, request) : 0);
        around_caches = !reduces_in_place && output_bytes() > 0 && 4 * own_bytes >= 3 * group.cache_share();
        size_t in = 0, out = 0;
        for (size_t other = 0; other < request.input_counts.size(); ++other) {
            input_offsets[other] = in;
            output_offsets[other] = out;
            in += request.input_counts[other] * item;
            out += request.output_counts[other] * item;
        }
    }

    const char *input() const { return static_cast<const char *>(request.input); }
    char *output() const { return static_cast<char *>(request.output); }
    bool is_root() const { return me == request.root; }
    // Bytes of this rank's tensor that is cut into chunks, or of each of its parts.
    size_t total() const { return request.bytes(); }
    // How many parts the input has: one for each rank, or 1.
    size_t parts() const { return is_cut(request.operation) ? static_cast<size_t>(size) : 1; }
    size_t output_bytes() const {
        if (request.operation == broadcast && is_root()) {
            return 0;
        }
        size_t elements = request.count;
        for (const size_t part : request.output_counts) {
            elements += part;
        }
        const bool whole = request.operation == all_gather || request.operation == all_to_all ||
                           (request.operation == gather && is_root());
        return elements * item * (whole ? static_cast<size_t>(size) : 1);
    }
    // What rank `owner` reduces of `count` elements.
    Slice slice_of(size_t count, int owner) const {
        const auto ranks = static_cast<size_t>(size);
        const size_t each = rounded_up((count + ranks - 1) / ranks, alignment / item);
        const size_t begin = std::min(count, each * static_cast<size_t>(owner));
        return {begin, std::min(count, begin + each) - begin};
    }
    // Into a tensor; what is larger than the caches is better written around them. The two must not overlap, unless
    // they are the same.
    void copy(void *to, const void *from, size_t bytes, Route route = from_tensor) const {
        if (around_caches) {
            group_.streaming(route).copy(to, from, bytes);
        } else {
            kernels().copy(to, from, bytes);
        }
    }
    void copy_out_of_ring(void *to, const void *from, size_t bytes) const { copy(to, from, bytes, out_of_ring); }
    // `where(rank)` is the input of a rank.
    template <class Where>
    void reduce_from(const Where &where, void *const *outputs, int output_count, size_t count,
                     bool streams = false) const {
        const void *inputs[max_ranks];
        for (int one = 0; one < size; ++one) {
            inputs[one] = where(one);
        }
        kernels().reduce(request.dtype, request.op, outputs, output_count, inputs, size, count, streams);
    }
    template <class Where>
    void reduce_from(const Where &where, void *output, size_t count) const {
        reduce_from(where, &output, 1, count);
    }

    const Request &request;
    const int size, me;
    const size_t item;
    bool around_caches = false;
    std::array<size_t, max_ranks> input_offsets{}, output_offsets{};  // bytes, of all_to_all_v

private:
    Group &group_;
};

}  // namespace shm
