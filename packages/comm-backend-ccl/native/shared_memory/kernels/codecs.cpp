// Compiled once for every instruction set, as CODECS. Loops are written so that the compiler uses vectors.

#include "kernels/codecs.hpp"

#include "kernels/float16.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <type_traits>

namespace shm {
namespace {

constexpr float least_normal = std::numeric_limits<float>::min();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

// The largest magnitude; infinite or NaN where any is not finite.
float largest(const float *values, size_t count) {
    uint32_t most = 0;
    for (size_t i = 0; i < count; ++i) {
        most = std::max(most, bits_of(values[i]) & 0x7fffffffu);
    }
    return float_of(most);
}

// So that `levels` times the scale is the largest magnitude, and finite; 0 where the quotient would not be normal.
float scale_for(float magnitude, float levels) {
    if (!(magnitude <= std::numeric_limits<float>::max())) {
        return not_a_number;
    }
    float scale = magnitude / levels;
    if (scale < least_normal) {
        return 0.0f;
    }
    if (scale * levels > std::numeric_limits<float>::max()) {
        scale = float_of(bits_of(scale) - 1);
    }
    return scale;
}

float inverse_of(float scale) { return scale == 0.0f || scale != scale ? 0.0f : 1.0f / scale; }

// Rounds to an integer, ties to even, for magnitudes below 2^22; its low bits are those of the result.
constexpr float rounder = 12582912.0f;

void integers_of(const float *values, size_t count, float inverse, int8_t *to) {
    for (size_t i = 0; i < count; ++i) {
        to[i] = static_cast<int8_t>(bits_of(values[i] * inverse + rounder) & 0xffu);
    }
}

// The lower halves of two bytes in one, the first in its lower half.
void pack_nibbles(const int8_t *values, size_t pairs, uint8_t *to) {
    for (size_t i = 0; i < pairs; ++i) {
        uint16_t both;
        std::memcpy(&both, values + 2 * i, 2);
        if constexpr (std::endian::native == std::endian::big) {
            both = static_cast<uint16_t>(both << 8 | both >> 8);
        }
        to[i] = static_cast<uint8_t>((both & 0xfu) | (both >> 4 & 0xf0u));
    }
}

// Of OCP's 8-bit floats: as many bits of mantissa, and what the exponent's bias differs by from float32's.
template <int Mantissa, int Bias>
struct Eight {
    static uint8_t narrowed(float value) {
        const uint32_t bits = bits_of(value), rest = bits & 0x7fffffffu;
        constexpr uint32_t least = static_cast<uint32_t>(127 - Bias + 1) << 23;
        // Adding what has a unit in the last place of one step makes the hardware round a denormal's integer.
        const float step = float_of(static_cast<uint32_t>(127 + 1 - Bias - Mantissa + 23) << 23);
        const uint32_t small = bits_of(float_of(rest) + step) - bits_of(step);
        const uint32_t normal = (rest - (static_cast<uint32_t>(127 - Bias) << 23) + ((1u << (22 - Mantissa)) - 1) +
                                 ((rest >> (23 - Mantissa)) & 1u)) >>
                                (23 - Mantissa);
        return static_cast<uint8_t>((rest < least ? small : normal) | (bits >> 24 & 0x80u));
    }
    static float widened(uint8_t value) {
        const uint32_t rest = value & 0x7fu, sign = static_cast<uint32_t>(value & 0x80u) << 24;
        const float step = float_of(static_cast<uint32_t>(127 + 1 - Bias - Mantissa) << 23);
        const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(rest)) * step);
        const uint32_t normal = (rest << (23 - Mantissa)) + (static_cast<uint32_t>(127 - Bias) << 23);
        return float_of((rest < (1u << Mantissa) ? small : normal) | sign);
    }
};
using E4m3 = Eight<3, 7>;
using E5m2 = Eight<2, 15>;

// The mean of the magnitudes, in an order that does not depend on the length of vectors: 16 sums, then a tree. NaN
// where a value is not finite, which makes the sum so.
float mean_magnitude(const float *values, size_t count) {
    constexpr float part = 1.0f / static_cast<float>(most_block);  // so that no sum is too large
    float sums[16] = {};
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        for (size_t lane = 0; lane < 16; ++lane) {
            sums[lane] += std::fabs(values[i + lane]) * part;
        }
    }
    for (size_t lane = 0; i < count; ++i, ++lane) {
        sums[lane] += std::fabs(values[i]) * part;
    }
    for (size_t half = 8; half > 0; half /= 2) {
        for (size_t lane = 0; lane < half; ++lane) {
            sums[lane] += sums[lane + half];
        }
    }
    constexpr float most = std::numeric_limits<float>::max();
    if (!(sums[0] <= most) && !(largest(values, count) <= most)) {
        return not_a_number;
    }
    return sums[0] * (static_cast<float>(most_block) / static_cast<float>(count));
}

// As many bits as there are lanes from `values` on, the first in the lowest.
#if defined(__AVX512F__)
uint32_t signs_at(const float *values) {
    return _mm512_cmp_ps_mask(_mm512_loadu_ps(values), _mm512_setzero_ps(), _CMP_GE_OQ);
}
#elif defined(__AVX2__)
uint32_t signs_at(const float *values) {
    const __m256 zero = _mm256_setzero_ps();
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(values), zero, _CMP_GE_OQ)));
}
#endif

void signs_of(const float *values, size_t count, uint8_t *to) {
    size_t i = 0;
#ifdef __AVX2__
    for (; i + lanes <= count; i += lanes) {
        const uint32_t bits = signs_at(values + i);
        std::memcpy(to + i / 8, &bits, lanes / 8);
    }
#endif
    for (; i < count; i += 8) {
        uint32_t byte = 0;
        for (size_t bit = 0; bit < std::min<size_t>(8, count - i); ++bit) {
            byte |= static_cast<uint32_t>(values[i + bit] >= 0.0f) << bit;
        }
        to[i / 8] = static_cast<uint8_t>(byte);
    }
}

template <bool Adds>
void put_signs(const uint8_t *from, float scale, float *target, size_t count) {
    size_t i = 0;
#if defined(__AVX512F__)
    const __m512 positive = _mm512_set1_ps(scale), negative = _mm512_set1_ps(-scale);
    for (; i + 16 <= count; i += 16) {
        uint16_t bits;
        std::memcpy(&bits, from + i / 8, 2);
        const __m512 value = _mm512_mask_blend_ps(bits, negative, positive);
        _mm512_storeu_ps(target + i, Adds ? _mm512_add_ps(_mm512_loadu_ps(target + i), value) : value);
    }
#elif defined(__AVX2__)
    const __m256 positive = _mm256_set1_ps(scale), negative = _mm256_set1_ps(-scale);
    const __m256i places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (; i + 8 <= count; i += 8) {
        const __m256i bits = _mm256_and_si256(_mm256_set1_epi32(from[i / 8]), places);
        const __m256 ones = _mm256_castsi256_ps(_mm256_cmpeq_epi32(bits, places));
        const __m256 value = _mm256_blendv_ps(negative, positive, ones);
        _mm256_storeu_ps(target + i, Adds ? _mm256_add_ps(_mm256_loadu_ps(target + i), value) : value);
    }
#endif
    const uint32_t magnitude = bits_of(scale);
    for (; i < count; ++i) {
        const uint32_t is_negative = ~static_cast<uint32_t>(from[i / 8] >> i % 8) & 1u;
        const float value = float_of(magnitude ^ is_negative << 31);
        target[i] = Adds ? target[i] + value : value;
    }
}

template <class Format>
void narrow_eight(const float *values, size_t count, float inverse, uint8_t *to) {
    for (size_t i = 0; i < count; ++i) {
        to[i] = Format::narrowed(values[i] * inverse);
    }
}

// In their order, unlike narrow() and widen() of bfloat16, which are each other's inverse alone.
template <class Convert>
void to_halves(const float *input, size_t count, uint8_t *to) {
    auto *output = reinterpret_cast<uint16_t *>(to);
    if constexpr (std::is_same_v<Convert, Half>) {
        narrow<Half>(output, input, count);
    } else {
        std::transform(input, input + count, output, Convert::narrowed);
    }
}

template <class Convert, bool Adds>
void from_halves(const uint8_t *from, float *target, size_t count) {
    const auto *input = reinterpret_cast<const uint16_t *>(from);
    if constexpr (Adds) {
        alignas(64) float decoded[most_block];
        from_halves<Convert, false>(from, decoded, count);
        std::transform(target, target + count, decoded, target, std::plus<float>());
    } else if constexpr (std::is_same_v<Convert, Half>) {
        widen<Half>(target, input, count);
    } else {
        std::transform(input, input + count, target, Convert::widened);
    }
}

// Up to most_block elements, of one block where there are blocks: its scale, and its elements from `to` on.
float encode_block(int codec, const float *values, size_t count, uint8_t *to) {
    switch (codec) {
    case codec_fp16:
        to_halves<Half>(values, count, to);
        return 1.0f;
    case codec_bf16:
        to_halves<Brain>(values, count, to);
        return 1.0f;
    case codec_fp8_e4m3: {
        const float scale = scale_for(largest(values, count), 448.0f);
        narrow_eight<E4m3>(values, count, inverse_of(scale), to);
        return scale;
    }
    case codec_fp8_e5m2: {
        const float scale = scale_for(largest(values, count), 57344.0f);
        narrow_eight<E5m2>(values, count, inverse_of(scale), to);
        return scale;
    }
    case codec_int8: {
        const float scale = scale_for(largest(values, count), 127.0f);
        integers_of(values, count, inverse_of(scale), reinterpret_cast<int8_t *>(to));
        return scale;
    }
    case codec_int4: {
        // In two loops, each of which the compiler makes vectors of.
        alignas(64) int8_t integers[most_block];
        const float scale = scale_for(largest(values, count), 7.0f);
        integers_of(values, count, inverse_of(scale), integers);
        if (count % 2 != 0) {
            integers[count] = 0;
        }
        pack_nibbles(integers, (count + 1) / 2, to);
        return scale;
    }
    default:
        signs_of(values, count, to);
        return mean_magnitude(values, count);
    }
}

template <bool Adds, class Value>
void put(float *target, size_t count, const Value &value) {
    for (size_t i = 0; i < count; ++i) {
        target[i] = Adds ? target[i] + value(i) : value(i);
    }
}

template <bool Adds>
void decode_block(int codec, const uint8_t *from, float scale, float *target, size_t count) {
    switch (codec) {
    case codec_fp16:
        return from_halves<Half, Adds>(from, target, count);
    case codec_bf16:
        return from_halves<Brain, Adds>(from, target, count);
    case codec_fp8_e4m3:
        return put<Adds>(target, count, [&](size_t i) { return E4m3::widened(from[i]) * scale; });
    case codec_fp8_e5m2:
        return put<Adds>(target, count, [&](size_t i) { return E5m2::widened(from[i]) * scale; });
    case codec_int8:
        return put<Adds>(target, count, [&](size_t i) {
            return static_cast<float>(static_cast<int32_t>(static_cast<int8_t>(from[i]))) * scale;
        });
    case codec_int4: {
        const auto low = [&](size_t i) {
            return static_cast<float>(static_cast<int32_t>(from[i] << 28) >> 28) * scale;
        };
        const auto high = [&](size_t i) { return static_cast<float>(static_cast<int8_t>(from[i]) >> 4) * scale; };
        size_t i = 0;
        for (; i < count / 2; ++i) {
            const float first = low(i), second = high(i);
            target[2 * i] = Adds ? target[2 * i] + first : first;
            target[2 * i + 1] = Adds ? target[2 * i + 1] + second : second;
        }
        if (count % 2 != 0) {
            target[2 * i] = Adds ? target[2 * i] + low(i) : low(i);
        }
        return;
    }
    default:
        return put_signs<Adds>(from, scale, target, count);
    }
}

void add_error(const float *source, const float *error, size_t count, float *to) {
    for (size_t i = 0; i < count; ++i) {
        to[i] = source[i] + error[i];
    }
}

// Where `values` were encoded and decoded again.
void keep_error(const float *values, const float *decoded, size_t count, float *error) {
    for (size_t i = 0; i < count; ++i) {
        const float lost = values[i] - decoded[i];
        error[i] = (bits_of(lost) & 0x7f800000u) == 0x7f800000u ? 0.0f : lost;
    }
}

// Of a block: with `decoded`, which may be `source`, leaves there what is decoded from `to`.
void encode_one(int codec, const float *source, float *error, size_t count, float *scale, uint8_t *to, float *decoded) {
    alignas(64) float values[most_block], unwanted[most_block];
    if (error != nullptr) {
        add_error(source, error, count, values);
        source = values;
    }
    *scale = encode_block(codec, source, count, to);
    if (error != nullptr && decoded == nullptr) {
        decoded = unwanted;
    }
    if (decoded != nullptr) {
        decode_block<false>(codec, to, *scale, decoded, count);
    }
    if (error != nullptr) {
        keep_error(source, decoded, count, error);
    }
}

void decode_one(int codec, const uint8_t *from, float scale, float *target, size_t count, bool adds) {
    if (adds) {
        decode_block<true>(codec, from, scale, target, count);
    } else {
        decode_block<false>(codec, from, scale, target, count);
    }
}

// Calls one(at, part, scale, begin) for each block of `count` elements: their number from `at` on is `part`, and they
// are `begin` bytes after `wire`, their scale is the one of this number.
template <class One>
void for_blocks(int codec, size_t count, size_t block, const One &one) {
    const bool scaled = has_blocks(codec);
    const size_t unit = scaled ? block : most_block;
    const size_t begin = scaled ? (count + block - 1) / block * sizeof(float) : 0;
    for (size_t at = 0; at < count; at += unit) {
        one(at, std::min(unit, count - at), at / unit, begin + at * codec_bits(codec) / 8);
    }
}

float scale_in(int codec, const void *wire, size_t number) {
    return has_blocks(codec) ? static_cast<const float *>(wire)[number] : 1.0f;
}

void encode(int codec, const float *source, float *error, size_t count, size_t block, void *wire) {
    for_blocks(codec, count, block, [&](size_t at, size_t part, size_t number, size_t begin) {
        float unscaled, *scale = has_blocks(codec) ? static_cast<float *>(wire) + number : &unscaled;
        encode_one(codec, source + at, error == nullptr ? nullptr : error + at, part, scale,
                   static_cast<uint8_t *>(wire) + begin, nullptr);
    });
}

void decode(int codec, const void *wire, float *target, size_t count, size_t block, bool adds) {
    for_blocks(codec, count, block, [&](size_t at, size_t part, size_t number, size_t begin) {
        decode_one(codec, static_cast<const uint8_t *>(wire) + begin, scale_in(codec, wire, number), target + at, part,
                   adds);
    });
}

void decode_reduce_encode(int codec, const void *const *wires, size_t inputs, float *total, float divisor, float *error,
                          size_t count, size_t block, void *wire) {
    for_blocks(codec, count, block, [&](size_t at, size_t part, size_t number, size_t begin) {
        for (size_t input = 0; input < inputs; ++input) {
            decode_block<true>(codec, static_cast<const uint8_t *>(wires[input]) + begin,
                               scale_in(codec, wires[input], number), total + at, part);
        }
        if (divisor != 1.0f) {
            for (size_t i = at; i < at + part; ++i) {
                total[i] /= divisor;
            }
        }
        float unscaled, *scale = has_blocks(codec) ? static_cast<float *>(wire) + number : &unscaled;
        encode_one(codec, total + at, error == nullptr ? nullptr : error + at, part, scale,
                   static_cast<uint8_t *>(wire) + begin, total + at);
    });
}

}  // namespace

extern const Codecs CODECS;
const Codecs CODECS{encode, decode, decode_reduce_encode};

}  // namespace shm
