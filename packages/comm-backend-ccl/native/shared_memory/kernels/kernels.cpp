// Compiled once for every instruction set, as KERNELS.

#include "kernels/kernels.hpp"

#include "kernels/float16.hpp"
#include "kernels/float_mode.hpp"

#include <algorithm>
#include <type_traits>

#ifdef __x86_64__
#include <cpuid.h>
#endif

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

namespace shm {
namespace {

// Elements that are reduced at a time: what is between two steps stays in the first-level cache.
constexpr size_t block = 512;
constexpr int deepest = 7, max_inputs = 64;  // of a tree over 64 ranks
// What is written to several outputs is reduced into the first and copied to the others in parts of so many bytes:
// copies of less are too short for show(), and more leaves the first-level cache. Around the caches, stores go on while
// the next part is reduced.
constexpr size_t part_bytes = 8 << 10, streamed_part_bytes = 2 << 10;

// --- copies

constexpr size_t page = 4 << 10;

void copy(void *output, const void *input, size_t bytes) { std::memcpy(output, input, bytes); }

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Whether string instructions are fast: ERMS or FSRM.
bool has_fast_strings() noexcept {
    unsigned eax, ebx = 0, ecx, edx = 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && ((ebx >> 9 | edx >> 4) & 1) != 0;
}
const bool fast_strings = has_fast_strings();

// Such a copy claims whole lines, many at a time. A vector store waits until another core has given up its copy of the
// line, and few of them wait at once: between cores without a common cache it takes four times as long.
void show(void *output, const void *input, size_t bytes) {
    if (!fast_strings) {
        std::memcpy(output, input, bytes);
        return;
    }
    asm volatile("rep movsb" : "+D"(output), "+S"(input), "+c"(bytes) : : "memory");
}
#else
void show(void *output, const void *input, size_t bytes) { std::memcpy(output, input, bytes); }
#endif

#ifdef WITH_VECTORS
// 64 bytes to where they are aligned.
void put_around(char *to, const char *from) {
#ifdef KERNELS_ARE_NEON
    const auto all = vld1q_u8_x4(reinterpret_cast<const uint8_t *>(from));
    // No intrinsic of GCC makes this store.
    asm volatile("stnp %q1, %q2, [%0]\n\tstnp %q3, %q4, [%0, #32]" ::"r"(to), "w"(all.val[0]), "w"(all.val[1]),
                 "w"(all.val[2]), "w"(all.val[3])
                 : "memory");
#else
    const __m256i low = loaded<__m256i>(from), high = loaded<__m256i>(from + 32);
    _mm256_stream_si256(reinterpret_cast<__m256i *>(to), low);
    _mm256_stream_si256(reinterpret_cast<__m256i *>(to + 32), high);
#endif
}

// Up to where the output begins a line.
void copy_to_line(char *&to, const char *&from, size_t &bytes) {
    const size_t head = std::min<size_t>(-reinterpret_cast<uintptr_t>(to) & 63, bytes);
    std::memcpy(to, from, head);
    to += head, from += head, bytes -= head;
}
#endif

// Without a fence. `ahead`: what follows by so many bytes is prefetched. The processor prefetches within a page, so one
// stream waits for memory at every page, unless it asks for the next one by itself.
template <size_t ahead>
void copy_lines(void *output, const void *input, size_t bytes) {
#ifdef WITH_VECTORS
    auto *to = static_cast<char *>(output);
    const auto *from = static_cast<const char *>(input);
    copy_to_line(to, from, bytes);
    constexpr size_t lines = 2;
    for (; bytes >= lines * 64; bytes -= lines * 64, to += lines * 64, from += lines * 64) {
        if (ahead > 0 && bytes > ahead) {  // what is behind the end may be what another rank writes
            for (size_t line = 0; line < lines * 64; line += 64) {
                __builtin_prefetch(from + line + ahead);
            }
        }
        for (size_t line = 0; line < lines * 64; line += 64) {
            put_around(to + line, from + line);
        }
    }
    for (; bytes >= 64; bytes -= 64, to += 64, from += 64) {
        put_around(to, from);
    }
    std::memcpy(to, from, bytes);
#else
    std::memcpy(output, input, bytes);
#endif
}

// Without a fence; in several pages at a time.
void copy_pages(void *output, const void *input, size_t bytes) {
#ifdef WITH_VECTORS
    auto *to = static_cast<char *>(output);
    const auto *from = static_cast<const char *>(input);
    copy_to_line(to, from, bytes);
    constexpr size_t pages = 4, burst = 256;
    for (; bytes >= pages * page; bytes -= pages * page, to += pages * page, from += pages * page) {
        for (size_t at = 0; at < page; at += burst) {
            for (size_t of = at; of < pages * page; of += page) {
                for (size_t line = of; line < of + burst; line += 64) {
                    put_around(to + line, from + line);
                }
            }
        }
    }
    copy_lines<0>(to, from, bytes);
#else
    std::memcpy(output, input, bytes);
#endif
}

// Before a flag says that all is written. What x86 writes around the caches keeps no order otherwise; on ARM, a release
// store and an exchange with release come after STNP as after every store.
void fence() {
#ifdef __AVX2__
    _mm_sfence();
#endif
}

void stream(void *output, const void *input, size_t bytes) {
    copy_lines<page>(output, input, bytes);
    fence();
}

void stream_pages(void *output, const void *input, size_t bytes) {
    copy_pages(output, input, bytes);
    fence();
}

// --- what is done with two elements; integers wrap around

template <class T>
using Wrapping = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::type_identity<T>>::type;

struct Sum {
    template <class T>
    static T of(T a, T b) {
        return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    }
#ifdef WITH_VECTORS
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
#ifdef WITH_VECTORS
    static Floats of(Floats a, Floats b) { return a * b; }
#endif
};
// NaN on either side gives NaN.
struct Minimum {
    template <class T>
    static T of(T a, T b) {
        return a < b || a != a ? a : b;
    }
#ifdef WITH_VECTORS
    static Floats of(Floats a, Floats b) { return (a < b) | (a != a) ? a : b; }
#endif
};
struct Maximum {
    template <class T>
    static T of(T a, T b) {
        return a > b || a != a ? a : b;
    }
#ifdef WITH_VECTORS
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
// Of booleans, of which every byte but 0 is true.
struct Differ {
    template <class T>
    static T of(T a, T b) {
        return (a != 0) != (b != 0);
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
void combine_narrow(uint16_t *output, const uint16_t *a, const uint16_t *b, size_t count,
                    [[maybe_unused]] float divisor) {
    size_t i = 0;
#ifdef WITH_VECTORS
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

template <class F, class A, class T, class Convert>
void reduce_blocks(void *all, const void *const *inputs, int input_count, size_t count, bool mean) {
    Tree<F, A, T, Convert> tree;
    tree.inputs = inputs;
    A result[block];
    const A divisor = static_cast<A>(input_count);
    for (size_t offset = 0; offset < count; offset += block) {
        const size_t length = count - offset < block ? count - offset : block;
        tree.offset = offset;
        tree.length = length;
        T *output = static_cast<T *>(all) + offset;
        A *target = result;
        if constexpr (!std::is_void_v<Convert>) {
            if (input_count == 2) {
                combine_narrow<F, Convert>(output, static_cast<const T *>(inputs[0]) + offset,
                                           static_cast<const T *>(inputs[1]) + offset, length, mean ? divisor : 1.0f);
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
    }
}

template <class A, class T, class Convert>
void reduce_floats(int op, void *output, const void *const *inputs, int input_count, size_t count) {
    switch (op) {
    case sum:
    case average:
        return reduce_blocks<Sum, A, T, Convert>(output, inputs, input_count, count, op == average);
    case product:
        return reduce_blocks<Product, A, T, Convert>(output, inputs, input_count, count, false);
    case minimum:
        return reduce_blocks<Minimum, A, T, Convert>(output, inputs, input_count, count, false);
    case maximum:
        return reduce_blocks<Maximum, A, T, Convert>(output, inputs, input_count, count, false);
    default:  // ruled out by reduces()
        break;
    }
}

template <class T>
void reduce_integers(int op, void *output, const void *const *inputs, int input_count, size_t count) {
    using None = void;
    switch (op) {
    case sum:
        return reduce_blocks<Sum, T, T, None>(output, inputs, input_count, count, false);
    case product:
        return reduce_blocks<Product, T, T, None>(output, inputs, input_count, count, false);
    case minimum:
        return reduce_blocks<Minimum, T, T, None>(output, inputs, input_count, count, false);
    case maximum:
        return reduce_blocks<Maximum, T, T, None>(output, inputs, input_count, count, false);
    case bit_and:
        return reduce_blocks<And, T, T, None>(output, inputs, input_count, count, false);
    case bit_or:
        return reduce_blocks<Or, T, T, None>(output, inputs, input_count, count, false);
    case bit_xor:
        return reduce_blocks<Xor, T, T, None>(output, inputs, input_count, count, false);
    default:  // ruled out by reduces()
        break;
    }
}

// A byte of more than 1 is true as well, as in torch, so that the bits of two of them say nothing.
void reduce_booleans(int op, void *output, const void *const *inputs, int input_count, size_t count) {
    using None = void;
    switch (op) {
    case sum:
    case maximum:
    case bit_or:
        return reduce_blocks<Maximum, uint8_t, uint8_t, None>(output, inputs, input_count, count, false);
    case bit_xor:
        return reduce_blocks<Differ, uint8_t, uint8_t, None>(output, inputs, input_count, count, false);
    default:
        return reduce_blocks<Minimum, uint8_t, uint8_t, None>(output, inputs, input_count, count, false);
    }
}

void reduce_any(int dtype, int op, void *output, const void *const *inputs, int input_count, size_t count) {
#define WITH output, inputs, input_count, count
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
        return reduce_booleans(op, WITH);
    case float16:
        return reduce_floats<float, uint16_t, Half>(op, WITH);
    case bfloat16:
        return reduce_floats<float, uint16_t, Brain>(op, WITH);
    case float32:
        return reduce_floats<float, float, void>(op, WITH);
    case float64:
        return reduce_floats<double, double, void>(op, WITH);
    default:  // ruled out by reduces()
        break;
    }
#undef WITH
}

void reduce(int dtype, int op, void *const *outputs, int output_count, const void *const *inputs, int input_count,
            size_t count, bool streams) {
    const DefaultFloatMode usual;
    if (output_count == 1) {
        reduce_any(dtype, op, outputs[0], inputs, input_count, count);
        return;
    }
    const size_t item = item_bytes(dtype), most = (streams ? streamed_part_bytes : part_bytes) / item;
    const void *from[max_inputs];
    for (size_t done = 0; done < count; done += most) {
        const size_t part = std::min(most, count - done);
        for (int one = 0; one < input_count; ++one) {
            from[one] = static_cast<const char *>(inputs[one]) + done * item;
        }
        char *first = static_cast<char *>(outputs[0]) + done * item;
        reduce_any(dtype, op, first, from, input_count, part);
        for (int other = 1; other < output_count; ++other) {
            (streams ? copy_lines<0> : show)(static_cast<char *>(outputs[other]) + done * item, first, part * item);
        }
    }
    if (streams) {
        fence();
    }
}

}  // namespace

extern const Codecs CODECS;
extern const Kernels KERNELS;
const Kernels KERNELS{TEXT(KERNELS), reduce, copy, show, stream, stream_pages, CODECS};

}  // namespace shm
