// Compiled once for every instruction set, as KERNELS.

#include "kernels.hpp"

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
#endif

struct Half {
#ifdef __AVX2__
    static Floats load(const uint16_t *input) {
#ifdef __AVX512F__
        return reinterpret_cast<Floats>(_mm512_cvtph_ps(loaded<__m256i>(input)));
#else
        return reinterpret_cast<Floats>(_mm256_cvtph_ps(loaded<__m128i>(input)));
#endif
    }
    static void store(uint16_t *output, Floats value) {
#ifdef __AVX512F__
        const auto halves = _mm512_cvtps_ph(reinterpret_cast<__m512>(value), _MM_FROUND_TO_NEAREST_INT);
#else
        const auto halves = _mm256_cvtps_ph(reinterpret_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT);
#endif
        std::memcpy(output, &halves, sizeof(halves));
    }
#endif
    static float widened(uint16_t value) { return to_float(value); }
    static uint16_t narrowed(float value) { return to_half(value); }
};

struct Brain {
#ifdef __AVX2__
    static Floats load(const uint16_t *input) {
#ifdef __AVX512F__
        return reinterpret_cast<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(loaded<__m256i>(input)), 16));
#else
        return reinterpret_cast<Floats>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(loaded<__m128i>(input)), 16));
#endif
    }
    static void store(uint16_t *output, Floats value) {
        const Words bits = reinterpret_cast<Words>(value);
        const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const Words chosen = (bits & 0x7fffffffu) > 0x7f800000u ? Words{} + 0x7fc0u : rounded;
#ifdef __AVX512F__
        const __m256i halves = _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(chosen));
#else
        // Packs within each half of the register, and puts the halves together.
        const __m256i wide = reinterpret_cast<__m256i>(chosen);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(wide, wide), 0x08);
        const __m128i halves = _mm256_castsi256_si128(packed);
#endif
        std::memcpy(output, &halves, sizeof(halves));
    }
#endif
    static float widened(uint16_t value) { return std::bit_cast<float>(static_cast<uint32_t>(value) << 16); }
    static uint16_t narrowed(float value) {
        const uint32_t bits = std::bit_cast<uint32_t>(value);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
};

template <class Convert>
void widen(float *output, const uint16_t *input, size_t count) {
    size_t i = 0;
#ifdef __AVX2__
    for (; i + lanes <= count; i += lanes) {
        const Floats value = Convert::load(input + i);
        std::memcpy(output + i, &value, sizeof(value));
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
    for (; i + lanes <= count; i += lanes) {
        Convert::store(output + i, loaded<Floats>(input + i));
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
    for (; i + lanes <= count; i += lanes) {
        const Floats value = F::of(Convert::load(a + i), Convert::load(b + i));
        Convert::store(output + i, divisor == 1.0f ? value : value / divisor);
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
void copy_to_others(void *const *outputs, int output_count, const T *output, size_t offset, size_t length) {
    for (int other = 1; other < output_count; ++other) {
        std::memcpy(static_cast<T *>(outputs[other]) + offset, output, length * sizeof(T));
    }
}

template <class F, class A, class T, class Convert>
void reduce_blocks(void *const *outputs, int output_count, const void *const *inputs, int input_count, size_t count,
                   bool mean) {
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
                copy_to_others<T>(outputs, output_count, output, offset, length);
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
        copy_to_others<T>(outputs, output_count, output, offset, length);
    }
}

template <class A, class T, class Convert>
void reduce_floats(int op, void *const *outputs, int output_count, const void *const *inputs, int input_count,
                   size_t count) {
    switch (op) {
    case sum:
    case average:
        return reduce_blocks<Sum, A, T, Convert>(outputs, output_count, inputs, input_count, count, op == average);
    case product:
        return reduce_blocks<Product, A, T, Convert>(outputs, output_count, inputs, input_count, count, false);
    case minimum:
        return reduce_blocks<Minimum, A, T, Convert>(outputs, output_count, inputs, input_count, count, false);
    case maximum:
        return reduce_blocks<Maximum, A, T, Convert>(outputs, output_count, inputs, input_count, count, false);
    }
}

template <class T>
void reduce_integers(int op, void *const *outputs, int output_count, const void *const *inputs, int input_count,
                     size_t count) {
    using None = void;
    switch (op) {
    case sum:
        return reduce_blocks<Sum, T, T, None>(outputs, output_count, inputs, input_count, count, false);
    case product:
        return reduce_blocks<Product, T, T, None>(outputs, output_count, inputs, input_count, count, false);
    case minimum:
        return reduce_blocks<Minimum, T, T, None>(outputs, output_count, inputs, input_count, count, false);
    case maximum:
        return reduce_blocks<Maximum, T, T, None>(outputs, output_count, inputs, input_count, count, false);
    case bit_and:
        return reduce_blocks<And, T, T, None>(outputs, output_count, inputs, input_count, count, false);
    case bit_or:
        return reduce_blocks<Or, T, T, None>(outputs, output_count, inputs, input_count, count, false);
    case bit_xor:
        return reduce_blocks<Xor, T, T, None>(outputs, output_count, inputs, input_count, count, false);
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

void reduce(int dtype, int op, void *const *outputs, int output_count, const void *const *inputs, int input_count,
            size_t count) {
#define WITH outputs, output_count, inputs, input_count, count
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

void copy(void *output, const void *input, size_t bytes) { std::memcpy(output, input, bytes); }

void stream(void *output, const void *input, size_t bytes) {
#ifdef __AVX2__
    auto *to = static_cast<char *>(output);
    const auto *from = static_cast<const char *>(input);
    const size_t head = -reinterpret_cast<uintptr_t>(to) & 63;
    if (bytes < 4096) {
        std::memcpy(to, from, bytes);
        return;
    }
    std::memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= 64; bytes -= 64, to += 64, from += 64) {
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + 32));
        _mm256_stream_si256(reinterpret_cast<__m256i *>(to), low);
        _mm256_stream_si256(reinterpret_cast<__m256i *>(to + 32), high);
    }
    std::memcpy(to, from, bytes);
    _mm_sfence();
#else
    std::memcpy(output, input, bytes);
#endif
}

}  // namespace

extern const Kernels KERNELS;
const Kernels KERNELS{TEXT(KERNELS), reduce, copy, stream};

}  // namespace shm
