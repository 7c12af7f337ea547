// How the processor rounds, which a thread may have changed.

#pragma once

#include <cstdint>

namespace shm {
namespace {

// Keeps denormals and rounds to nearest until its end. A program may have set another mode in some of its threads, and
// which thread computes depends on timing. Nothing that touches memory is moved across the switch.
class DefaultFloatMode {
public:
    DefaultFloatMode() : found_(mode()) {
        if (const Word wanted = found_ & ~changed; wanted != found_) {
            set(wanted);
        }
    }
    ~DefaultFloatMode() {
        if ((found_ & changed) != 0) {
            set(found_);
        }
    }
    DefaultFloatMode(const DefaultFloatMode &) = delete;

private:
#if defined(__x86_64__)
    using Word = uint32_t;
    static constexpr Word changed = 1u << 15 | 3u << 13 | 1u << 6;  // FTZ, RC and DAZ of MXCSR
    static Word mode() {
        Word found;
        asm volatile("stmxcsr %0" : "=m"(found) : : "memory");
        return found;
    }
    static void set(Word wanted) { asm volatile("ldmxcsr %0" : : "m"(wanted) : "memory"); }
#elif defined(__aarch64__)
    using Word = uint64_t;
    static constexpr Word changed = 1u << 24 | 3u << 22 | 1u << 19 | 1u << 0;  // FZ, RMode, FZ16 and FIZ of FPCR
    static Word mode() {
        Word found;
        asm volatile("mrs %0, fpcr" : "=r"(found) : : "memory");
        return found;
    }
    static void set(Word wanted) { asm volatile("msr fpcr, %0" : : "r"(wanted) : "memory"); }
#else
    using Word = uint32_t;
    static constexpr Word changed = 0;
    static Word mode() { return 0; }
    static void set(Word) {}
#endif
    const Word found_;
};

}  // namespace
}  // namespace shm
