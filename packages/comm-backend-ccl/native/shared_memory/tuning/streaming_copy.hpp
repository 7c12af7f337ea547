// Which copy around the caches is the faster one here.
//
// Both write the same bytes, so every rank chooses for itself, by the times of its own copies.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace shm {

// What is copied around the caches, of which each has a choice of its own: it matters whether a cache holds the source.
enum Route : uint8_t { into_ring, out_of_ring, from_tensor, routes };

// Begins with as many trials of each as it takes the median of; later, one copy in 64 is a trial of the slower one.
class StreamingCopy {
public:
    void copy(void *to, const void *from, size_t bytes);

    // The rest is for tests.
    static constexpr size_t least_bytes = size_t{64} << 10;  // smaller copies say little
    // The copy that comes next, and whether its duration is wanted.
    struct Choice {
        uint8_t pattern;
        bool counts;
    };
    Choice next();
    void observe(uint8_t pattern, uint64_t ns, size_t bytes);
    uint8_t best() const { return best_; }

private:
    static constexpr int samples = 5;
    static constexpr uint32_t between_trials = 64;              // copies, of an even number
    std::array<std::array<uint64_t, samples>, 2> ps_a_byte_{};  // the last ones of each
    std::array<uint32_t, 2> counts_{};
    uint32_t copies_ = 0;
    uint8_t best_ = 0;  // 0 is kernels().stream, 1 stream_pages
};

}  // namespace shm
