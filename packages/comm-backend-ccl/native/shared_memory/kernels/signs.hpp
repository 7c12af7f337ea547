// The signs of a block of floats, a bit each, and the mean of their magnitudes.

#pragma once

#include "kernels/codecs.hpp"
#include "kernels/float16.hpp"
#include "kernels/scales.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace shm {
namespace {

// Sums are made of so many elements at a time, so that results do not depend on the length of vectors.
constexpr size_t sign_lanes = 16;
constexpr float part_of_mean = 1.0f / static_cast<float>(most_block);  // so that no sum is too large

// NaN where a value is not finite, which makes a sum so.
float mean_of(float *sums, const float *values, size_t count) {
    for (size_t half = sign_lanes / 2; half > 0; half /= 2) {
        for (size_t lane = 0; lane < half; ++lane) {
            sums[lane] += sums[lane + half];
        }
    }
    constexpr float most = std::numeric_limits<float>::max();
    if (!(sums[0] <= most) && !(largest(values, count) <= most)) {
        return not_a_number;
    }
    // The quotient may be rounded up, which would make the mean of the largest numbers infinite.
    return std::min(sums[0] * (static_cast<float>(most_block) / static_cast<float>(count)), most);
}

float with_sign(float scale, bool positive) {
    return float_of(bits_of(scale) ^ static_cast<uint32_t>(!positive) << 31);
}

#ifdef WITH_VECTORS
Floats splat(float value) { return value - Floats{}; }
Floats magnitudes(Floats values) {
    return reinterpret_cast<Floats>(reinterpret_cast<Words>(values) & (Words{} + 0x7fffffffu));
}

// Of a register at element `at`, which is a multiple of its lanes.
void put_bits(Floats values, uint8_t *to, size_t at) {
#if defined(__AVX512F__)
    const auto bits = static_cast<uint16_t>(_mm512_cmp_ps_mask(values, _mm512_setzero_ps(), _CMP_GE_OQ));
    std::memcpy(to + at / 8, &bits, 2);
#elif defined(__AVX2__)
    const __m256 positive = _mm256_cmp_ps(values, _mm256_setzero_ps(), _CMP_GE_OQ);
    to[at / 8] = static_cast<uint8_t>(_mm256_movemask_ps(positive));
#else
    const uint32x4_t places = {1, 2, 4, 8};
    const auto bits = static_cast<uint8_t>(vaddvq_u32(vandq_u32(vcgezq_f32(values), places)));
    to[at / 8] = static_cast<uint8_t>(at % 8 == 0 ? bits : to[at / 8] | bits << 4);
#endif
}

Floats with_signs(Floats positive, const uint8_t *from, size_t at) {
#if defined(__AVX512F__)
    uint16_t bits;
    std::memcpy(&bits, from + at / 8, 2);
    return _mm512_mask_blend_ps(bits, -positive, positive);
#elif defined(__AVX2__)
    const __m256i places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i bits = _mm256_and_si256(_mm256_set1_epi32(from[at / 8]), places);
    return _mm256_blendv_ps(-positive, positive, _mm256_castsi256_ps(_mm256_cmpeq_epi32(bits, places)));
#else
    const uint32x4_t places = {1, 2, 4, 8};
    return vbslq_f32(vtstq_u32(vdupq_n_u32(from[at / 8] >> at % 8), places), positive, -positive);
#endif
}
#endif

// Elements to encode: as they are, with an error added, or the sum of `total` and of what another has encoded.
struct Plain {
    const float *source;

    float one(size_t i) const { return source[i]; }
#ifdef WITH_VECTORS
    Floats some(size_t i) const { return loaded<Floats>(source + i); }
#endif
};

struct WithError {
    const float *source, *error;

    float one(size_t i) const { return source[i] + error[i]; }
#ifdef WITH_VECTORS
    Floats some(size_t i) const { return loaded<Floats>(source + i) + loaded<Floats>(error + i); }
#endif
};

template <bool Divides, bool Errs>
struct Reduced {
    const float *total, *error;
    const uint8_t *signs;
    float scale, divisor;

    float one(size_t i) const {
        const float sum = total[i] + with_sign(scale, (signs[i / 8] >> i % 8 & 1u) != 0);
        const float value = Divides ? sum / divisor : sum;
        return Errs ? value + error[i] : value;
    }
#ifdef WITH_VECTORS
    Floats some(size_t i) const {
        Floats values = loaded<Floats>(total + i) + with_signs(splat(scale), signs, i);
        if constexpr (Divides) {
            values /= splat(divisor);
        }
        if constexpr (Errs) {
            values += loaded<Floats>(error + i);
        }
        return values;
    }
#endif
};

// Writes the signs of `elements` to `to`, and returns their scale. Leaves in `values` what is encoded, unless that is
// Plain.
template <class Elements>
float encode_signs(const Elements &elements, float *values, size_t count, uint8_t *to) {
    constexpr bool keeps = !std::is_same_v<Elements, Plain>;
    float sums[sign_lanes] = {};
    size_t i = 0;
#ifdef WITH_VECTORS
    Floats parts[sign_lanes / lanes] = {};
    for (; i + sign_lanes <= count; i += sign_lanes) {
        for (size_t number = 0; number < sign_lanes / lanes; ++number) {
            const size_t at = i + number * lanes;
            const Floats some = elements.some(at);
            if constexpr (keeps) {
                kept(values + at, some);
            }
            parts[number] += magnitudes(some) * splat(part_of_mean);
            put_bits(some, to, at);
        }
    }
    std::memcpy(sums, parts, sizeof(sums));
#endif
    for (; i < count; i += 8) {
        uint32_t byte = 0;
        for (size_t bit = 0; bit < std::min<size_t>(8, count - i); ++bit) {
            const float value = elements.one(i + bit);
            if constexpr (keeps) {
                values[i + bit] = value;
            }
            sums[(i + bit) % sign_lanes] += std::fabs(value) * part_of_mean;
            byte |= static_cast<uint32_t>(value >= 0.0f) << bit;
        }
        to[i / 8] = static_cast<uint8_t>(byte);
    }
    if constexpr (keeps) {
        return mean_of(sums, values, count);
    } else {
        return mean_of(sums, elements.source, count);
    }
}

// What `values` decode to, into `decoded`, and what they lose by that, into `error`; either may be null.
template <bool Decodes, bool Errs>
void keep_signs(const float *values, float scale, size_t count, float *decoded, float *error) {
    size_t i = 0;
#ifdef WITH_VECTORS
    for (; i + lanes <= count; i += lanes) {
        const Floats some = loaded<Floats>(values + i);
        const Floats rounded = some >= Floats{} ? splat(scale) : -splat(scale);
        if constexpr (Decodes) {
            kept(decoded + i, rounded);
        }
        if constexpr (Errs) {
            const Floats lost = some - rounded;
            const Words exponent = Words{} + 0x7f800000u;
            kept(error + i, (reinterpret_cast<Words>(lost) & exponent) == exponent ? Floats{} : lost);
        }
    }
#endif
    for (; i < count; ++i) {
        const float rounded = with_sign(scale, values[i] >= 0.0f);
        if constexpr (Decodes) {
            decoded[i] = rounded;
        }
        if constexpr (Errs) {
            error[i] = without_infinities(values[i] - rounded);
        }
    }
}

template <bool Adds>
void put_signs(const uint8_t *from, float scale, float *target, size_t count) {
    size_t i = 0;
#ifdef WITH_VECTORS
    for (; i + lanes <= count; i += lanes) {
        const Floats values = with_signs(splat(scale), from, i);
        kept(target + i, Adds ? loaded<Floats>(target + i) + values : values);
    }
#endif
    for (; i < count; ++i) {
        const float value = with_sign(scale, (from[i / 8] >> i % 8 & 1u) != 0);
        target[i] = Adds ? target[i] + value : value;
    }
}

}  // namespace
}  // namespace shm
