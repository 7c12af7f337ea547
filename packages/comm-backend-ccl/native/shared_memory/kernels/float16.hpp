// 16-bit floats to and from float32, with the instructions that a file is compiled for. VCVTNEPS2BF16 would flush
// denormals.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

// What explicit vectors are made of: AVX2, or NEON in the build that has its name. Its conversions of float16 are in
// every ARMv8, without the extension for arithmetic in float16, which would round after each step.
#if defined(__AVX2__)
#include <immintrin.h>
#define WITH_VECTORS
#elif defined(KERNELS_ARE_NEON)
#include <arm_neon.h>
#define WITH_VECTORS
#endif

namespace shm {
namespace {

float to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t rest = half & 0x7fffu;
    // A denormal's value is its integer times 2^-24; others only need their exponent moved.
    const float small = static_cast<float>(rest) * 0x1p-24f;
    const uint32_t normal = (rest << 13) + 0x38000000u;
    const uint32_t extreme = (rest << 13) | 0x7f800000u;
    const uint32_t bits = rest < 0x400u ? std::bit_cast<uint32_t>(small) : rest >= 0x7c00u ? extreme : normal;
    return std::bit_cast<float>(bits | sign);
}

uint16_t to_half(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t rest = bits & 0x7fffffffu;
    // Adding 0.5 makes the hardware round a denormal's integer, to even.
    const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(rest) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (rest + 0xc8000fffu + ((rest >> 13) & 1u)) >> 13;
    const uint32_t extreme = rest > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t half = rest < 0x38800000u ? small : rest >= 0x477ff000u ? extreme : normal;
    return static_cast<uint16_t>(half | sign);
}

// As many floats as the instruction set computes at a time; 0 where that is left to the compiler.
#if defined(__AVX512F__)
constexpr size_t lanes = 16;
#elif defined(__AVX2__)
constexpr size_t lanes = 8;
#elif defined(KERNELS_ARE_NEON)
constexpr size_t lanes = 4;
#else
constexpr size_t lanes = 0;
#endif
#ifdef WITH_VECTORS
using Floats __attribute__((vector_size(lanes * 4))) = float;
using Words __attribute__((vector_size(lanes * 4))) = uint32_t;

template <class V>
V loaded(const void *from) {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
}

template <class V>
void kept(void *to, V value) {
    std::memcpy(to, &value, sizeof(V));
}
#endif

// Of twice as many 16-bit elements as a register has lanes; in which order they are in two registers is left to each
// type.
struct Half {
#ifdef WITH_VECTORS
    static void load(const uint16_t *input, Floats &a, Floats &b) {
#ifdef __AVX512F__
        a = reinterpret_cast<Floats>(_mm512_cvtph_ps(loaded<__m256i>(input)));
        b = reinterpret_cast<Floats>(_mm512_cvtph_ps(loaded<__m256i>(input + lanes)));
#elif defined(KERNELS_ARE_NEON)
        a = reinterpret_cast<Floats>(vcvt_f32_f16(loaded<float16x4_t>(input)));
        b = reinterpret_cast<Floats>(vcvt_f32_f16(loaded<float16x4_t>(input + lanes)));
#else
        a = reinterpret_cast<Floats>(_mm256_cvtph_ps(loaded<__m128i>(input)));
        b = reinterpret_cast<Floats>(_mm256_cvtph_ps(loaded<__m128i>(input + lanes)));
#endif
    }
    static void store(uint16_t *output, Floats a, Floats b) {
#ifdef KERNELS_ARE_NEON
        // As the processor's mode says, which is to nearest in every process that did not change it.
        kept(output, vcvt_f16_f32(reinterpret_cast<float32x4_t>(a)));
        kept(output + lanes, vcvt_f16_f32(reinterpret_cast<float32x4_t>(b)));
#else
        constexpr int nearest = _MM_FROUND_TO_NEAREST_INT;
#ifdef __AVX512F__
        kept(output, _mm512_cvtps_ph(reinterpret_cast<__m512>(a), nearest));
        kept(output + lanes, _mm512_cvtps_ph(reinterpret_cast<__m512>(b), nearest));
#else
        kept(output, _mm256_cvtps_ph(reinterpret_cast<__m256>(a), nearest));
        kept(output + lanes, _mm256_cvtps_ph(reinterpret_cast<__m256>(b), nearest));
#endif
#endif
    }
#endif
    static float widened(uint16_t value) { return to_float(value); }
    static uint16_t narrowed(float value) { return to_half(value); }
};

struct Brain {
#ifdef WITH_VECTORS
    // Elements of even index, and of odd: neither has to be moved to another lane.
    static void load(const uint16_t *input, Floats &even, Floats &odd) {
        const Words pairs = loaded<Words>(input);
        even = reinterpret_cast<Floats>(pairs << 16);
        odd = reinterpret_cast<Floats>(pairs & 0xffff0000u);
    }
    static Words rounded(Floats value) {
        const Words bits = reinterpret_cast<Words>(value);
        const Words result = bits + 0x7fffu + ((bits >> 16) & 1u);
        return (bits & 0x7fffffffu) > 0x7f800000u ? Words{} + 0x7fc00000u : result;
    }
    static void store(uint16_t *output, Floats even, Floats odd) {
#ifdef __AVX512F__
        const auto pairs = _mm512_mask_blend_epi16(0xaaaaaaaau, reinterpret_cast<__m512i>(rounded(even) >> 16),
                                                   reinterpret_cast<__m512i>(rounded(odd)));
#elif defined(KERNELS_ARE_NEON)
        const auto pairs =
            vsriq_n_u32(reinterpret_cast<uint32x4_t>(rounded(odd)), reinterpret_cast<uint32x4_t>(rounded(even)), 16);
#else
        const auto pairs = _mm256_blend_epi16(reinterpret_cast<__m256i>(rounded(even) >> 16),
                                              reinterpret_cast<__m256i>(rounded(odd)), 0xaa);
#endif
        kept(output, pairs);
    }
#endif
    static float widened(uint16_t value) { return std::bit_cast<float>(static_cast<uint32_t>(value) << 16); }
    static uint16_t narrowed(float value) {
        const uint32_t bits = std::bit_cast<uint32_t>(value);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
};

// In the order of Convert::load, which narrow() undoes.
template <class Convert>
void widen(float *output, const uint16_t *input, size_t count) {
    size_t i = 0;
#ifdef WITH_VECTORS
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
        Floats first, second;
        Convert::load(input + i, first, second);
        kept(output + i, first);
        kept(output + i + lanes, second);
    }
#endif
    for (; i < count; ++i) {
        output[i] = Convert::widened(input[i]);
    }
}

template <class Convert>
void narrow(uint16_t *output, const float *input, size_t count) {
    size_t i = 0;
#ifdef WITH_VECTORS
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
        Convert::store(output + i, loaded<Floats>(input + i), loaded<Floats>(input + i + lanes));
    }
#endif
    for (; i < count; ++i) {
        output[i] = Convert::narrowed(input[i]);
    }
}

}  // namespace
}  // namespace shm
