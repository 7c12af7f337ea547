// Lossy formats for float32 on the wire; comm_collectives.compression describes them and computes the same bits.

#pragma once

#include <cstddef>

namespace shm {

// The codes of tables.py.
enum CodecFormat {
    codec_fp16,
    codec_bf16,
    codec_fp8_e4m3,
    codec_fp8_e5m2,
    codec_int8,
    codec_int4,
    codec_onebit,
    codecs
};

extern const char *const codec_names[codecs];

constexpr size_t most_block = 4096;

// A block is a multiple of 16 elements that have one scale; formats without scales have none.
constexpr bool has_blocks(int codec) { return codec != codec_fp16 && codec != codec_bf16; }
constexpr size_t codec_bits(int codec) {
    constexpr size_t bits[codecs] = {16, 16, 8, 8, 8, 4, 1};
    return bits[codec];
}
constexpr size_t encoded_bytes(int codec, size_t count, size_t block) {
    const size_t payload = (count * codec_bits(codec) + 7) / 8;
    return payload + (has_blocks(codec) ? (count + block - 1) / block * sizeof(float) : 0);
}

struct Codecs {
    // Writes encoded_bytes() to `wire`, which is aligned to 4 bytes: all scales, then all elements. With `error`, it
    // encodes source + error and leaves in `error` what the encoding has lost, 0 where that is not finite.
    void (*encode)(int codec, const float *source, float *error, size_t count, size_t block, void *wire);
    // Overwrites `target`, or adds to it.
    void (*decode)(int codec, const void *wire, float *target, size_t count, size_t block, bool adds);
    // Adds what `wires` hold to `total`, in their order, divides by `divisor`, encodes that into `wire`, with `error`
    // as encode() does, and overwrites `total` with what is decoded from `wire`: the bits of these steps one by one, in
    // one pass over the memory.
    void (*decode_reduce_encode)(int codec, const void *const *wires, size_t inputs, float *total, float divisor,
                                 float *error, size_t count, size_t block, void *wire);
};

}  // namespace shm
