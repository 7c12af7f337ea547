#include "tuning/streaming_copy.hpp"

#include "kernels/kernels.hpp"

#include <algorithm>
#include <chrono>

namespace shm {

namespace {

void copy_in(StreamingCopy::Way way, void *to, const void *from, size_t bytes) {
    (way == StreamingCopy::lines ? kernels().stream : kernels().stream_pages)(to, from, bytes);
}

}  // namespace

bool StreamingCopy::next_is_trial() { return copies_++ % between_trials == 0 || trials_ < trials_kept; }

void StreamingCopy::observe(uint64_t lines_ns, uint64_t pages_ns) {
    ratios_[trials_++ % trials_kept] = 1000 * pages_ns / std::max<uint64_t>(lines_ns, 1);
    if (trials_ < trials_kept) {
        return;
    }
    auto sorted = ratios_;
    std::nth_element(sorted.begin(), sorted.begin() + trials_kept / 2, sorted.end());
    const uint64_t median = sorted[trials_kept / 2];
    // The margin keeps noise from changing it often.
    if (median < 950) {
        best_ = pages;
    } else if (median > 1050) {
        best_ = lines;
    }
}

void StreamingCopy::copy(void *to, const void *from, size_t bytes) {
    if (bytes < least_bytes || !next_is_trial()) {
        copy_in(best_, to, from, bytes);
        return;
    }
    using Clock = std::chrono::steady_clock;
    const auto ns = [](Clock::duration taken) {
        return static_cast<uint64_t>(std::chrono::nanoseconds(taken).count());
    };
    // Each way comes first in turn.
    const Way first = trials_ % 2 == 0 ? lines : pages, second = first == lines ? pages : lines;
    const size_t half = bytes / 128 * 64;
    const auto begin = Clock::now();
    copy_in(first, to, from, half);
    const auto middle = Clock::now();
    copy_in(second, static_cast<char *>(to) + half, static_cast<const char *>(from) + half, bytes - half);
    const uint64_t first_ns = ns(middle - begin), second_ns = ns(Clock::now() - middle);
    observe(first == lines ? first_ns : second_ns, first == lines ? second_ns : first_ns);
}

}  // namespace shm
