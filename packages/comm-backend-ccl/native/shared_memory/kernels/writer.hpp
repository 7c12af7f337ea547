// Writes what other ranks read, in the way that is the fastest between the cores on which they are just now.

#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace shm {

// Where two cores share a cache, a copy through it is the fastest. Where they do not, writing a line that the other has
// read means asking all caches of the processor to forget it, which takes ten times as long as writing to memory,
// around the caches. How long it takes with one line, that of a flag, tells which of the two it is; it changes when
// threads, or virtual machines, are moved.
class Writer {
public:
    void write(void *to, const void *from, size_t bytes) const;
    // Whether writes go around the caches now.
    bool streams() const { return streams_; }
    // How much longer it took to write a flag at which another rank may have looked than one that is nobody else's.
    void learn(std::chrono::nanoseconds longer);
    // Writes a flag with `store`, and learns from it now and then.
    template <class Store>
    void flag(const Store &store) {
        if (++flags_ % timed_one_in != 0) {
            store();
            return;
        }
        // Without what is still to be written before it.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        const auto begin = std::chrono::steady_clock::now();
        store();
        learn(std::chrono::steady_clock::now() - begin - own_flag());
    }
    // From now on, whatever it learns.
    void settle(bool streams) { settled_ = true, streams_ = streams; }

private:
    // What the same takes with a flag of one's own, and the clock.
    static std::chrono::nanoseconds own_flag();

    // A clock takes as long as a small operation.
    static constexpr uint32_t timed_one_in = 32;

    uint32_t flags_ = 0;
    uint8_t far_ = 0;  // a bit for each of the last samples
    bool streams_ = false, settled_ = false;
};

}  // namespace shm
