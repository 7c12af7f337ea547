#include "recorder/clock.hpp"

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace shm::flight {

namespace {

bool counts_at_one_rate() noexcept {
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned leaf = 0x80000007u, invariant = 1u << 8;
    return __get_cpuid(leaf, &a, &b, &c, &d) != 0 && (d & invariant) != 0;
#elif defined(__aarch64__)
    return true;
#else
    return false;
#endif
}

}  // namespace

const bool has_counter = counts_at_one_rate();

Moment now() noexcept {
    if (!has_counter) {
        const uint64_t ns = monotonic_ns();
        return {ns, ns};
    }
    // Of several attempts, the one that nothing interrupted.
    Moment best{};
    uint64_t shortest = ~uint64_t{0};
    for (int attempt = 0; attempt < 4; ++attempt) {
        const uint64_t before = ticks(), ns = monotonic_ns(), taken = ticks() - before;
        if (taken < shortest) {
            shortest = taken;
            best = {before + taken / 2, ns};
        }
    }
    return best;
}

const Moment loaded = now();

}  // namespace shm::flight
