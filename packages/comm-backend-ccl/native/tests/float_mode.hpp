// A thread that flushes denormals and rounds upwards, as programs may.

#pragma once

#include <cfenv>
#include <cstdint>

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

namespace tests {

// As torch.set_flush_denormal(True) does.
inline void flush_denormals() {
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040u);
#elif defined(__aarch64__)
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    asm volatile("msr fpcr, %0" : : "r"(mode | 1u << 24));
#endif
}

class OtherFloatMode {
public:
    OtherFloatMode() {
        std::fegetenv(&before_);
        flush_denormals();
        std::fesetround(FE_UPWARD);
    }
    ~OtherFloatMode() { std::fesetenv(&before_); }
    OtherFloatMode(const OtherFloatMode &) = delete;

    bool is_set() const {
        volatile float tiny = 1e-39f;  // a denormal
        return std::fegetround() == FE_UPWARD && tiny == 0.0f;
    }

private:
    std::fenv_t before_;
};

}  // namespace tests
