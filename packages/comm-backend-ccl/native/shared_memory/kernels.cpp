// Compiled once for every instruction set, as KERNELS.

#include "kernels.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

namespace shm {
namespace {

// Elements that are reduced at a time: what is between two steps stays in the first-level cache.
constexpr size_t block = 512;
constexpr int deepest = 7;  // of a tree over 64 ranks

// --- 16-bit floats to and from float32; VCVTNEPS2BF16 would flush denormals

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
#else
constexpr size_t lanes = 0;
#endif
#ifdef __AVX2__
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

// --- copies

void copy(void *output, const void *input, size_t bytes) { std::memcpy(output, input, bytes); }

// Without a fence.
void copy_around(void *output, const void *input, size_t bytes) {
#ifdef __AVX2__
    auto *to = static_cast<char *>(output);
    const auto *from = static_cast<const char *>(input);
    const size_t head = std::min<size_t>(-reinterpret_cast<uintptr_t>(to) & 63, bytes);
    std::memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= 64; bytes -= 64, to += 64, from += 64) {
        const __m256i low = loaded<__m256i>(from), high = loaded<__m256i>(from + 32);
        _mm256_stream_si256(reinterpret_cast<__m256i *>(to), low);
        _mm256_stream_si256(reinterpret_cast<__m256i *>(to + 32), high);
    }
    std::memcpy(to, from, bytes);
#else
    std::memcpy(output, input, bytes);
#endif
}

void fence() {
#ifdef __AVX2__
    _mm_sfence();
#endif
}

void stream(void *output, const void *input, size_t bytes) {
    copy_around(output, input, bytes);
    fence();
}

// Of twice as many 16-bit elements as a register has lanes; in which order they are in two registers is left to each type.
struct Half {
#ifdef __AVX2__
    static void load(const uint16_t *input, Floats &a, Floats &b) {
#ifdef __AVX512F__
        a = reinterpret_cast<Floats>(_mm512_cvtph_ps(loaded<__m256i>(input)));
        b = reinterpret_cast<Floats>(_mm512_cvtph_ps(loaded<__m256i>(input + lanes)));
#else
        a = reinterpret_cast<Floats>(_mm256_cvtph_ps(loaded<__m128i>(input)));
        b = reinterpret_cast<Floats>(_mm256_cvtph_ps(loaded<__m128i>(input + lanes)));
#endif
    }
    static void store(uint16_t *output, Floats a, Floats b) {
        constexpr int nearest = _MM_FROUND_TO_NEAREST_INT;
#ifdef __AVX512F__
        kept(output, _mm512_cvtps_ph(reinterpret_cast<__m512>(a), nearest));
        kept(output + lanes, _mm512_cvtps_ph(reinterpret_cast<__m512>(b), nearest));
#else
        kept(output, _mm256_cvtps_ph(reinterpret_cast<__m256>(a), nearest));
        kept(output + lanes, _mm256_cvtps_ph(reinterpret_cast<__m256>(b), nearest));
#endif
    }
#endif
    static float widened(uint16_t value) { return to_float(value); }
    static uint16_t narrowed(float value) { return to_half(value); }
};

struct Brain {
#ifdef __AVX2__
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
#ifdef __AVX2__
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
#ifdef __AVX2__
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
        Convert::store(output + i, loaded<Floats>(input + i), loaded<Floats>(input + i + lanes));
    }
#endif
    for (; i < count; ++i) {
        output[i] = Convert::narrowed(input[i]);
    }
}

// --- what is done with two elements; integers wrap around

template <class T>
using Wrapping = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::type_identity<T>>::type;

struct Sum {
    template <class T>
    static T of(T a, T b) {
        return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    }
#ifdef __AVX2__
    static Floats of(Floats a, Floats b) { return a + b; }
#endif
};
struct Product {
    template <class T>
    static T of(T a, T b) {
        // Of 16-bit integers it would overflow the int that they are promoted to.
        using Wide = std::conditional_t<std::is_integral_v<T> && sizeof(T) < 4, uint32_t, Wrapping<T>>;
        return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
    }
#ifdef __AVX2__
    static Floats of(Floats a, Floats b) { return a * b; }
#endif
};
// NaN on either side gives NaN.
struct Minimum {
    template <class T>
    static T of(T a, T b) {
        return a < b || a != a ? a : b;
    }
#ifdef __AVX2__
    static Floats of(Floats a, Floats b) { return (a < b) | (a != a) ? a : b; }
#endif
};
struct Maximum {
    template <class T>
    static T of(T a, T b) {
        return a > b || a != a ? a : b;
    }
#ifdef __AVX2__
    static Floats of(Floats a, Floats b) { return (a > b) | (a != a) ? a : b; }
#endif
};
struct And {
    template <class T>
    static T of(T a, T b) {
        return a & b;
    }
};
struct Or {
    template <class T>
    static T of(T a, T b) {
        return a | b;
    }
};
struct Xor {
    template <class T>
    static T of(T a, T b) {
        return a ^ b;
    }
};

template <class F, class T>
void combine(T *output, const T *a, const T *b, size_t count) {
    // An output that is an input is so element by element.
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) {
        output[i] = F::of(a[i], b[i]);
    }
}

// The same of two 16-bit tensors at once, without a stop in memory.
template <class F, class Convert>
void combine_narrow(uint16_t *output, const uint16_t *a, const uint16_t *b, size_t count, [[maybe_unused]] float divisor) {
    size_t i = 0;
#ifdef __AVX2__
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
        Floats a_first, a_second, b_first, b_second;
        Convert::load(a + i, a_first, a_second);
        Convert::load(b + i, b_first, b_second);
        Floats first = F::of(a_first, b_first), second = F::of(a_second, b_second);
        if (divisor != 1.0f) {
            first = first / divisor;
            second = second / divisor;
        }
        Convert::store(output + i, first, second);
    }
#endif
    for (; i < count; ++i) {
        const float value = F::of(Convert::widened(a[i]), Convert::widened(b[i]));
        output[i] = Convert::narrowed(divisor == 1.0f ? value : value / divisor);
    }
}

int left_part(int count) { return static_cast<int>(std::bit_floor(static_cast<unsigned>(count - 1))); }

// One block of a tree over inputs of T, reduced as A; Convert is void where they are the same.
template <class F, class A, class T, class Convert>
struct Tree {
    const void *const *inputs;
    size_t offset, length;
    alignas(64) A between[deepest][2][block];

    // The reduction of `count` inputs from `first`: an input itself, or `output`.
    const A *of(int first, int count, A *output, int depth) {
        if (count == 1) {
            const T *input = static_cast<const T *>(inputs[first]) + offset;
            if constexpr (std::is_void_v<Convert>) {
                return input;
            } else {
                widen<Convert>(output, input, length);
                return output;
            }
        }
        const int left = left_part(count);
        const A *a = of(first, left, between[depth][0], depth + 1);
        const A *b = of(first + left, count - left, between[depth][1], depth + 1);
        combine<F>(output, a, b, length);
        return output;
    }
};

template <class T>
void copy_to_others(void *const *outputs, int output_count, const T *output, size_t offset, size_t length,
                    bool streams) {
    for (int other = 1; other < output_count; ++other) {
        (streams ? copy_around : copy)(static_cast<T *>(outputs[other]) + offset, output, length * sizeof(T));
    }
}

template <class F, class A, class T, class Convert>
void reduce_blocks(void *const *outputs, int output_count, const void *const *inputs, int input_count, size_t count,
                   bool streams, bool mean) {
    Tree<F, A, T, Convert> tree;
    tree.inputs = inputs;
    A result[block];
    const A divisor = static_cast<A>(input_count);
    for (size_t offset = 0; offset < count; offset += block) {
        const size_t length = count - offset < block ? count - offset : block;
        tree.offset = offset;
        tree.length = length;
        T *output = static_cast<T *>(outputs[0]) + offset;
        A *target = result;
        if constexpr (!std::is_void_v<Convert>) {
            if (input_count == 2) {
                combine_narrow<F, Convert>(output, static_cast<const T *>(inputs[0]) + offset,
                                           static_cast<const T *>(inputs[1]) + offset, length, mean ? divisor : 1.0f);
                copy_to_others<T>(outputs, output_count, output, offset, length, streams);
                continue;
            }
        }
        if constexpr (std::is_void_v<Convert>) {
            target = output;
        }
        const A *found = tree.of(0, input_count, target, 0);
        if constexpr (std::is_floating_point_v<A>) {
            if (mean) {
#pragma GCC ivdep
                for (size_t i = 0; i < length; ++i) {
                    target[i] = found[i] / divisor;
                }
                found = target;
            }
        }
        if constexpr (!std::is_void_v<Convert>) {
            narrow<Convert>(output, found, length);
        } else if (found != output) {
            std::memmove(output, found, length * sizeof(T));
        }
        copy_to_others<T>(outputs, output_count, output, offset, length, streams);
    }
}

template <class A, class T, class Convert>
void reduce_floats(int op, void *const *outputs, int output_count, const void *const *inputs, int input_count,
                   size_t count, bool streams) {
    switch (op) {
    case sum:
    case average:
        return reduce_blocks<Sum, A, T, Convert>(outputs, output_count, inputs, input_count, count, streams,
                                              op == average);
    case product:
        return reduce_blocks<Product, A, T, Convert>(outputs, output_count, inputs, input_count, count, streams, false);
    case minimum:
        return reduce_blocks<Minimum, A, T, Convert>(outputs, output_count, inputs, input_count, count, streams, false);
    case maximum:
        return reduce_blocks<Maximum, A, T, Convert>(outputs, output_count, inputs, input_count, count, streams, false);
    }
}

template <class T>
void reduce_integers(int op, void *const *outputs, int output_count, const void *const *inputs, int input_count,
                     size_t count, bool streams) {
    using None = void;
    switch (op) {
    case sum:
        return reduce_blocks<Sum, T, T, None>(outputs, output_count, inputs, input_count, count, streams, false);
    case product:
        return reduce_blocks<Product, T, T, None>(outputs, output_count, inputs, input_count, count, streams, false);
    case minimum:
        return reduce_blocks<Minimum, T, T, None>(outputs, output_count, inputs, input_count, count, streams, false);
    case maximum:
        return reduce_blocks<Maximum, T, T, None>(outputs, output_count, inputs, input_count, count, streams, false);
    case bit_and:
        return reduce_blocks<And, T, T, None>(outputs, output_count, inputs, input_count, count, streams, false);
    case bit_or:
        return reduce_blocks<Or, T, T, None>(outputs, output_count, inputs, input_count, count, streams, false);
    case bit_xor:
        return reduce_blocks<Xor, T, T, None>(outputs, output_count, inputs, input_count, count, streams, false);
    }
}

// What an operation comes to on the bytes 0 and 1.
int on_booleans(int op) {
    switch (op) {
    case sum:
    case maximum:
    case bit_or:
        return bit_or;
    case bit_xor:
        return bit_xor;
    default:
        return bit_and;
    }
}

void reduce_any(int dtype, int op, void *const *outputs, int output_count, const void *const *inputs, int input_count,
                size_t count, bool streams) {
#define WITH outputs, output_count, inputs, input_count, count, streams
    switch (dtype) {
    case int8:
        return reduce_integers<int8_t>(op, WITH);
    case uint8:
        return reduce_integers<uint8_t>(op, WITH);
    case int16:
        return reduce_integers<int16_t>(op, WITH);
    case uint16:
        return reduce_integers<uint16_t>(op, WITH);
    case int32:
        return reduce_integers<int32_t>(op, WITH);
    case uint32:
        return reduce_integers<uint32_t>(op, WITH);
    case int64:
        return reduce_integers<int64_t>(op, WITH);
    case uint64:
        return reduce_integers<uint64_t>(op, WITH);
    case boolean:
        return reduce_integers<uint8_t>(on_booleans(op), WITH);
    case float16:
        return reduce_floats<float, uint16_t, Half>(op, WITH);
    case bfloat16:
        return reduce_floats<float, uint16_t, Brain>(op, WITH);
    case float32:
        return reduce_floats<float, float, void>(op, WITH);
    case float64:
        return reduce_floats<double, double, void>(op, WITH);
    }
#undef WITH
}

void reduce(int dtype, int op, void *const *outputs, int output_count, const void *const *inputs, int input_count,
            size_t count, bool streams) {
    reduce_any(dtype, op, outputs, output_count, inputs, input_count, count, streams);
    if (streams) {
        fence();
    }
}

}  // namespace

extern const Kernels KERNELS;
const Kernels KERNELS{TEXT(KERNELS), reduce, copy, stream};

}  // namespace shm
