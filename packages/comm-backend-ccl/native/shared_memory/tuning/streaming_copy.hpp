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

// A trial copies one half of what is to be copied in each way, so that both have the same source at the same time. The
// first copies are trials, later one in 61, which is a multiple of no number of ranks.
class StreamingCopy {
public:
    void copy(void *to, const void *from, size_t bytes);

    enum Way : uint8_t { lines, pages };  // kernels().stream and stream_pages
    // A smaller copy is no trial: of each half, `pages` takes 16 KiB at a time.
    static constexpr size_t least_bytes = size_t{32} << 10;
    bool next_is_trial();
    void observe(uint64_t lines_ns, uint64_t pages_ns);
    Way best() const { return best_; }

private:
    static constexpr uint32_t trials_kept = 5, between_trials = 61;  // copies
    std::array<uint64_t, trials_kept> ratios_{};                     // of pages to lines, in thousandths
    uint32_t copies_ = 0, trials_ = 0;
    Way best_ = lines;
};

}  // namespace shm
