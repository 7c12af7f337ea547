// Compiled once for every instruction set, as CODECS. Loops are written so that the compiler uses vectors.

#include "kernels/codecs.hpp"

#include "kernels/float16.hpp"
#include "kernels/float_mode.hpp"
#include "kernels/scales.hpp"
#include "kernels/signs.hpp"

#include <algorithm>
#include <bit>
#include <functional>
#include <type_traits>

namespace shm {
namespace {

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
        return encode_signs(Plain{values}, nullptr, count, to);
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
        error[i] = without_infinities(values[i] - decoded[i]);
    }
}

// Of a block: with `decoded`, which may be `source`, leaves there what is decoded from `to`.
void encode_one(int codec, const float *source, float *error, size_t count, float *scale, uint8_t *to, float *decoded) {
    alignas(64) float values[most_block], unwanted[most_block];
    if (codec == codec_onebit && error != nullptr && decoded == nullptr) {
        *scale = encode_signs(WithError{source, error}, values, count, to);
        return keep_signs<false, true>(values, *scale, count, nullptr, error);
    }
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
    const DefaultFloatMode usual;
    for_blocks(codec, count, block, [&](size_t at, size_t part, size_t number, size_t begin) {
        float unscaled, *scale = has_blocks(codec) ? static_cast<float *>(wire) + number : &unscaled;
        encode_one(codec, source + at, error == nullptr ? nullptr : error + at, part, scale,
                   static_cast<uint8_t *>(wire) + begin, nullptr);
    });
}

void decode(int codec, const void *wire, float *target, size_t count, size_t block, bool adds) {
    const DefaultFloatMode usual;
    for_blocks(codec, count, block, [&](size_t at, size_t part, size_t number, size_t begin) {
        decode_one(codec, static_cast<const uint8_t *>(wire) + begin, scale_in(codec, wire, number), target + at, part,
                   adds);
    });
}

// What decode_reduce_encode() does, with the last of `wires` in the loop that encodes.
template <bool Divides, bool Errs>
void reduce_signs(const void *const *wires, size_t inputs, float *total, float divisor, float *error, size_t count,
                  size_t block, void *wire) {
    for_blocks(codec_onebit, count, block, [&](size_t at, size_t part, size_t number, size_t begin) {
        const auto scale_of = [&](size_t input) { return scale_in(codec_onebit, wires[input], number); };
        const auto signs = [&](size_t input) { return static_cast<const uint8_t *>(wires[input]) + begin; };
        const size_t last = inputs - 1;
        for (size_t input = 0; input < last; ++input) {
            put_signs<true>(signs(input), scale_of(input), total + at, part);
        }
        float *lost = Errs ? error + at : nullptr;
        const Reduced<Divides, Errs> sums{total + at, lost, signs(last), scale_of(last), divisor};
        alignas(64) float values[most_block];
        const float scale = encode_signs(sums, values, part, static_cast<uint8_t *>(wire) + begin);
        static_cast<float *>(wire)[number] = scale;
        keep_signs<true, Errs>(values, scale, part, total + at, lost);
    });
}

void decode_reduce_encode(int codec, const void *const *wires, size_t inputs, float *total, float divisor, float *error,
                          size_t count, size_t block, void *wire) {
    const DefaultFloatMode usual;
    if (codec == codec_onebit && inputs > 0) {
        const auto with_error = divisor != 1.0f ? reduce_signs<true, true> : reduce_signs<false, true>;
        const auto without = divisor != 1.0f ? reduce_signs<true, false> : reduce_signs<false, false>;
        return (error != nullptr ? with_error : without)(wires, inputs, total, divisor, error, count, block, wire);
    }
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
