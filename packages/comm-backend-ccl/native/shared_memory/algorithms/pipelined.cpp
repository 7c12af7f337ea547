#include "algorithms/pipelined.hpp"

#include <bit>

namespace shm {

void Pipelined::plan(Group &group, const Operands &operands, size_t whole, const Range &range) {
    const Request &request = operands.request;
    const size_t parts = operands.parts();
    whole_ = whole;
    range_ = range;
    // Small chunks cost more in flags, and in turns of ranks that share a core; large ones leave the caches too early,
    // and keep whoever only takes waiting.
    const bool fits = whole_ * parts <= group.layout().ring_bytes();
    const size_t most = group.layout().chunk_bytes() * (fits || group.has_large_chunks() ? larger_chunk : 1);
    const size_t room = most / parts / alignment * alignment;
    constexpr size_t least = size_t{64} << 10, one_chunk = size_t{256} << 10;
    const size_t wanted = group.method().small_chunks ? std::max(least, whole_ / 16)
                          : whole_ <= one_chunk       ? whole_
                                                      : (whole_ + 1) / 2;
    const size_t piece = group.layout().piece_bytes;
    const bool near = group.method().ring == RingSize::near;
    chunk_ = near ? most_of_near * piece : std::min(room, rounded_up(std::max<size_t>(wanted, 1), alignment));
    chunks_ = static_cast<uint32_t>((range.end - range.begin + chunk_ - 1) / chunk_);
    // Each rank reduces a part, which the others copy, or each reduces all.
    const bool reduces = request.operation == all_reduce || request.operation == shm::reduce;
    stages_ = reduces && !group.method().by_all ? 3 : 2;
    pieces_ = std::bit_ceil(static_cast<uint32_t>((chunk_ * parts + piece - 1) / piece));
    first_ = group.take_pieces(pieces_, chunks_, near);
}

bool Pipelined::is_free(Group &group, uint32_t at, uint32_t &needed) const {
    return at >= chunks_ || group.pieces_are_free(piece_of(at), pieces_, needed);
}

void Pipelined::act(Group &group, const Operands &operands, uint32_t at) {
    if (at < chunks_) {
        group.mark_pieces(piece_of(at), pieces_);
        publish_chunk(group, operands, at);
    }
    if (stages_ == 3 && at >= 1 && at - 1 < chunks_) {
        reduce_chunk(group, operands, at - 1);
    }
    const uint32_t last = stages_ - 1;
    if (at >= last && at - last < chunks_) {
        consume_chunk(group, operands, at - last);
    }
}

void Pipelined::publish_chunk(Group &group, const Operands &operands, uint32_t chunk) {
    const int size = operands.size, me = operands.me;
    const size_t item = operands.item;
    char *to = slot(group, me, chunk);
    const size_t begin = chunk_begin(chunk), bytes = chunk_bytes(chunk, whole_);
    const auto write = [&](char *at, const char *from, size_t part) { group.write(at, from, part); };
    switch (operands.request.operation) {
    case all_reduce:
    case reduce:
        if (stages_ == 2 && operands.request.operation == shm::reduce && operands.is_root()) {
            break;
        }
        if (stages_ == 2) {
            write(to, operands.input() + begin, bytes);
        } else {
            const Slice mine = operands.slice_of(bytes / item, me);
            const size_t from = mine.begin * item, until = from + mine.count * item;
            write(to, operands.input() + begin, from);
            write(to + until, operands.input() + begin + until, bytes - until);
        }
        break;
    case all_gather: {
        char *own = operands.output() + static_cast<size_t>(me) * whole_;
        const auto keep = [&] {
            if (own != operands.input()) {
                operands.copy(own + begin, operands.input() + begin, bytes);
            }
        };
        // Whoever reads the chunk first fetches it from memory, which the copy around the caches does faster. What the
        // caches hold is published first, so that the others wait for less.
        if (operands.around_caches) {
            keep();
            write(to, operands.input() + begin, bytes);
        } else {
            write(to, operands.input() + begin, bytes);
            keep();
        }
        break;
    }
    case gather:
        if (operands.is_root()) {
            operands.copy(operands.output() + static_cast<size_t>(me) * whole_ + begin, operands.input() + begin,
                          bytes);
        } else {
            write(to, operands.input() + begin, bytes);
        }
        break;
    case broadcast:
        if (operands.is_root()) {
            write(to, operands.input() + begin, bytes);
        }
        break;
    case scatter:
        if (!operands.is_root()) {
            break;
        }
        [[fallthrough]];
    case reduce_scatter:
    case all_to_all:
        for (int other = 0; other < size; ++other) {
            if (other != me) {
                write(to + static_cast<size_t>(other) * chunk_,
                      operands.input() + static_cast<size_t>(other) * whole_ + begin, bytes);
            }
        }
        break;
    case all_to_all_v:
        for (int other = 0; other < size; ++other) {
            const size_t part = chunk_bytes(chunk, operands.request.input_counts[other] * item);
            if (other != me && part > 0) {
                write(to + static_cast<size_t>(other) * chunk_,
                      operands.input() + operands.input_offsets[other] + begin, part);
            }
        }
        break;
    default:  // the others move nothing in chunks
        break;
    }
}

void Pipelined::reduce_chunk(Group &group, const Operands &operands, uint32_t chunk) {
    const int me = operands.me;
    const size_t begin = chunk_begin(chunk), item = operands.item;
    const Slice mine = operands.slice_of(chunk_bytes(chunk, whole_) / item, me);
    const size_t offset = mine.begin * item;
    void *outputs[2];
    int count = 0;
    if (operands.request.operation == all_reduce || operands.is_root()) {
        outputs[count++] = operands.output() + begin + offset;
    }
    if (operands.request.operation == all_reduce || !operands.is_root()) {
        outputs[count++] = slot(group, me, chunk) + offset;
    }
    operands.reduce_from(
        [&](int one) -> const void * {
            return one == me ? operands.input() + begin + offset : slot(group, one, chunk) + offset;
        },
        outputs, count, mine.count, group.method().transfer == streamed && count > 1);
}

void Pipelined::consume_chunk(Group &group, const Operands &operands, uint32_t chunk) {
    const int me = operands.me;
    const size_t item = operands.item;
    const size_t begin = chunk_begin(chunk), bytes = chunk_bytes(chunk, whole_);
    switch (operands.request.operation) {
    case reduce:
        if (!operands.is_root()) {
            break;
        }
        [[fallthrough]];
    case all_reduce:
        if (stages_ == 2) {
            operands.reduce_from(
                [&](int one) -> const void * { return one == me ? operands.input() + begin : slot(group, one, chunk); },
                operands.output() + begin, bytes / item);
            break;
        }
        for (const int other : group.reading_order()) {
            const Slice theirs = operands.slice_of(bytes / item, other);
            operands.copy_out_of_ring(operands.output() + begin + theirs.begin * item,
                                      slot(group, other, chunk) + theirs.begin * item, theirs.count * item);
        }
        break;
    case gather:
        if (!operands.is_root()) {
            break;
        }
        [[fallthrough]];
    case all_gather:
        for (const int other : group.reading_order()) {
            operands.copy_out_of_ring(operands.output() + static_cast<size_t>(other) * whole_ + begin,
                                      slot(group, other, chunk), bytes);
        }
        break;
    case broadcast:
        if (!operands.is_root()) {
            operands.copy_out_of_ring(operands.output() + begin, slot(group, operands.request.root, chunk), bytes);
        }
        break;
    case scatter:
        if (operands.is_root()) {
            operands.copy(operands.output() + begin, operands.input() + static_cast<size_t>(me) * whole_ + begin,
                          bytes);
        } else {
            operands.copy_out_of_ring(operands.output() + begin,
                                      slot(group, operands.request.root, chunk) + static_cast<size_t>(me) * chunk_,
                                      bytes);
        }
        break;
    case reduce_scatter:
        operands.reduce_from(
            [&](int one) -> const void * {
                return one == me ? operands.input() + static_cast<size_t>(me) * whole_ + begin
                                 : slot(group, one, chunk) + static_cast<size_t>(me) * chunk_;
            },
            operands.output() + begin, bytes / item);
        break;
    case all_to_all:
        operands.copy(operands.output() + static_cast<size_t>(me) * whole_ + begin,
                      operands.input() + static_cast<size_t>(me) * whole_ + begin, bytes);
        for (const int other : group.reading_order()) {
            operands.copy_out_of_ring(operands.output() + static_cast<size_t>(other) * whole_ + begin,
                                      slot(group, other, chunk) + static_cast<size_t>(me) * chunk_, bytes);
        }
        break;
    case all_to_all_v:
        if (const size_t own = chunk_bytes(chunk, operands.request.output_counts[me] * item); own > 0) {
            operands.copy(operands.output() + operands.output_offsets[me] + begin,
                          operands.input() + operands.input_offsets[me] + begin, own);
        }
        for (const int other : group.reading_order()) {
            const size_t part = chunk_bytes(chunk, operands.request.output_counts[other] * item);
            if (part > 0) {
                operands.copy_out_of_ring(operands.output() + operands.output_offsets[other] + begin,
                                          slot(group, other, chunk) + static_cast<size_t>(me) * chunk_, part);
            }
        }
        break;
    default:
        break;
    }
}

}  // namespace shm
