// One process has one oneCCL, which is not thread-safe: every call into it holds `library`.

#pragma once

#include <atomic>
#include <chrono>
#include <mutex>

namespace oneccl {

using Clock = std::chrono::steady_clock;

extern std::timed_mutex library;
extern std::atomic<int> waiting;  // threads in wait_for(), which make progress for all
extern std::atomic<bool> forked;
extern std::atomic<bool> ranks_share_cores;
extern std::atomic<int> under_way;    // operations that have begun and are neither complete nor failed
extern bool stopped;                  // guarded by `library`
extern std::atomic<bool> unfinished;  // an operation was left under way, or failed

// Holds the library. Throws after 5 seconds: oneCCL creates a group without an end where a rank does not come.
class LibraryLock {
public:
    LibraryLock();
    ~LibraryLock() { library.unlock(); }
    LibraryLock(const LibraryLock &) = delete;
    LibraryLock &operator=(const LibraryLock &) = delete;
};

// Releases the library while a thread that holds it waits for other ranks, so that operations of other groups go on.
class LibraryRelease {
public:
    LibraryRelease() { library.unlock(); }
    ~LibraryRelease() { library.lock(); }
    LibraryRelease(const LibraryRelease &) = delete;
    LibraryRelease &operator=(const LibraryRelease &) = delete;
};

}  // namespace oneccl
