// Reductions and copies, built several times for different instruction sets and chosen at run time.

#pragma once

#include "kernels/codecs.hpp"

#include <cstddef>

namespace shm {

// The codes of tables.py.
enum Dtype {
    int8,
    uint8,
    int16,
    uint16,
    int32,
    uint32,
    int64,
    uint64,
    float16,
    float32,
    float64,
    bfloat16,
    boolean,
    dtypes,
};
enum Op { sum, product, minimum, maximum, average, bit_and, bit_or, bit_xor, ops };

constexpr size_t item_bytes(int dtype) {
    constexpr size_t bytes[dtypes] = {1, 1, 2, 2, 4, 4, 8, 8, 2, 4, 8, 2, 1};
    return bytes[dtype];
}

// Whether elements of `dtype` can be reduced with `op`.
bool reduces(int dtype, int op);

struct Kernels {
    const char *name;
    // Overwrites each of `outputs` with the reduction of all `inputs`, as a balanced tree over them in their order; an
    // output may be one of the inputs. 16-bit floats are reduced in float32 and rounded once. `streams`: all outputs
    // but the first are written around the caches.
    void (*reduce)(int dtype, int op, void *const *outputs, int output_count, const void *const *inputs,
                   int input_count, size_t count, bool streams);
    void (*copy)(void *output, const void *input, size_t bytes);
    // The same to where other cores read it, and may have it in their caches.
    void (*show)(void *output, const void *input, size_t bytes);
    // The same around the caches, for what is not read from here soon.
    void (*stream)(void *output, const void *input, size_t bytes);
    // As `stream`, four pages at a time: faster on some processors.
    void (*stream_pages)(void *output, const void *input, size_t bytes);
    const Codecs &codecs;
};

// Those chosen last.
const Kernels &kernels();
// Choose those that CCL_KERNELS names now ("avx512", "avx2", "neon", "portable"), or the best for this machine. All
// give the same bits, so calls under way may change.
const Kernels &choose_kernels();
// nullptr where this machine, or this build, has none of that name.
const Kernels *kernels_named(const char *name);

}  // namespace shm
