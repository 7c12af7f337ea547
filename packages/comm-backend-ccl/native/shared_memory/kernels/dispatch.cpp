#include "kernels/kernels.hpp"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#ifdef __aarch64__
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace shm {

extern const Kernels portable;
#ifdef __x86_64__
extern const Kernels avx2, avx512;
#elif defined(__aarch64__)
extern const Kernels neon;
#endif

const char *const codec_names[codecs] = {"fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "onebit"};

bool reduces(int dtype, int op) {
    const bool floats = dtype == float16 || dtype == bfloat16 || dtype == float32 || dtype == float64;
    if (dtype < 0 || dtype >= dtypes || op < 0 || op >= ops) {
        return false;
    }
    return floats ? op <= average : op != average;
}

const Kernels *kernels_named(const char *name) {
#ifdef __x86_64__
    const bool common =
        __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    if (std::strcmp(name, "avx512") == 0 && common && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
        return &avx512;
    }
    if (std::strcmp(name, "avx2") == 0 && common && __builtin_cpu_supports("avx2")) {
        return &avx2;
    }
#elif defined(__aarch64__)
    if (std::strcmp(name, "neon") == 0 && getauxval(AT_HWCAP) & HWCAP_ASIMD) {
        return &neon;
    }
#endif
    return std::strcmp(name, "portable") == 0 ? &portable : nullptr;
}

namespace {

std::atomic<const Kernels *> chosen{nullptr};

}  // namespace

const Kernels &choose_kernels() {
    const char *wanted = std::getenv("CCL_KERNELS");
    const Kernels *found = wanted == nullptr ? nullptr : kernels_named(wanted);
    for (const char *name : {"avx512", "avx2", "neon", "portable"}) {
        found = found == nullptr ? kernels_named(name) : found;
    }
    chosen.store(found, std::memory_order_release);
    return *found;
}

const Kernels &kernels() {
    const Kernels *found = chosen.load(std::memory_order_acquire);
    return found == nullptr ? choose_kernels() : *found;
}

}  // namespace shm
