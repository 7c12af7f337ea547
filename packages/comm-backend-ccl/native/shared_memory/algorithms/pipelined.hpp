// In chunks through the ring, of which one is published while those before it are reduced and consumed.

#pragma once

#include "algorithms/operands.hpp"

namespace shm {

class Pipelined {
public:
    // The longest part of all ranks, as their records say, and `range` of it, which is moved now.
    void plan(Group &group, const Operands &operands, size_t whole, const Range &range);
    // Whether the pieces for chunk `at` may be written; sets `needed` to the steps that this takes.
    bool is_free(Group &group, uint32_t at, uint32_t &needed) const;
    // Publishes chunk `at`, and does the other stages of those before it.
    void act(Group &group, const Operands &operands, uint32_t at);

    uint32_t chunks() const { return chunks_; }
    uint32_t steps() const { return 1 + chunks_ + stages_ - 1; }
    uint32_t posts() const { return steps() - 1; }

private:
    size_t chunk_begin(uint32_t chunk) const { return range_.begin + static_cast<size_t>(chunk) * chunk_; }
    size_t chunk_bytes(uint32_t chunk, size_t whole) const {
        const size_t begin = chunk_begin(chunk), end = std::min(whole, range_.end);
        return begin >= end ? 0 : std::min(chunk_, end - begin);
    }
    uint32_t piece_of(uint32_t chunk) const { return Group::taken_pieces(first_, pieces_, chunk); }
    char *slot(Group &group, int rank, uint32_t chunk) const { return group.piece(rank, piece_of(chunk)); }
    void publish_chunk(Group &group, const Operands &operands, uint32_t chunk);
    void reduce_chunk(Group &group, const Operands &operands, uint32_t chunk);
    void consume_chunk(Group &group, const Operands &operands, uint32_t chunk);

    size_t chunk_ = 0, whole_ = 0;  // bytes
    Range range_{};
    uint32_t chunks_ = 0, stages_ = 2, pieces_ = 0, first_ = 0;
};

}  // namespace shm
