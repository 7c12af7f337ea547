// The clock of records: the processor's own counter, which is read several times as fast as the system's clock.

#pragma once

#include <time.h>
#include <cstdint>

#ifdef __x86_64__
#include <x86intrin.h>
#endif

namespace shm::flight {

inline uint64_t monotonic_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

// Whether the counter goes on at one rate, whatever the processor does; otherwise ticks are nanoseconds.
extern const bool has_counter;

inline uint64_t ticks() {
#if defined(__x86_64__)
    return has_counter ? __rdtsc() : monotonic_ns();
#elif defined(__aarch64__)
    uint64_t now;
    asm volatile("mrs %0, cntvct_el0" : "=r"(now));
    return now;
#else
    return monotonic_ns();
#endif
}

// Both clocks at one moment.
struct Moment {
    uint64_t ticks, ns;
};
Moment now() noexcept;
// When this code was loaded.
extern const Moment loaded;

}  // namespace shm::flight
