#include "tuning/streaming_copy.hpp"

#include "kernels/kernels.hpp"

#include <algorithm>
#include <chrono>

namespace shm {

StreamingCopy::Choice StreamingCopy::next() {
    const uint32_t number = copies_++;
    if (counts_[0] < samples || counts_[1] < samples) {
        return {static_cast<uint8_t>(number % 2), true};
    }
    // In pairs, so that both were measured at the same time.
    switch (number % between_trials) {
    case 0:
        return {static_cast<uint8_t>(1 - best_), true};
    case 1:
        return {best_, true};
    default:
        return {best_, false};
    }
}

void StreamingCopy::observe(uint8_t pattern, uint64_t ns, size_t bytes) {
    ps_a_byte_[pattern][counts_[pattern]++ % samples] = ns * 1000 / bytes;
    if (counts_[0] < samples || counts_[1] < samples) {
        return;
    }
    const auto median = [&](uint8_t of) {
        auto sorted = ps_a_byte_[of];
        std::nth_element(sorted.begin(), sorted.begin() + samples / 2, sorted.end());
        return sorted[samples / 2];
    };
    // By a twentieth, so that noise changes nothing.
    const uint8_t other = 1 - best_;
    if (median(other) * 20 < median(best_) * 19) {
        best_ = other;
    }
}

void StreamingCopy::copy(void *to, const void *from, size_t bytes) {
    const auto by = [](uint8_t pattern) { return pattern == 0 ? kernels().stream : kernels().stream_pages; };
    if (bytes < least_bytes) {
        by(best_)(to, from, bytes);
        return;
    }
    const Choice choice = next();
    if (!choice.counts) {
        by(choice.pattern)(to, from, bytes);
        return;
    }
    const auto begin = std::chrono::steady_clock::now();
    by(choice.pattern)(to, from, bytes);
    const auto taken = std::chrono::steady_clock::now() - begin;
    observe(choice.pattern, static_cast<uint64_t>(std::chrono::nanoseconds(taken).count()), bytes);
}

}  // namespace shm
