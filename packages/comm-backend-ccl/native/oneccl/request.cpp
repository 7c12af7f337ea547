#include "oneccl/request.hpp"

#include "oneccl/library.hpp"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

namespace oneccl {

namespace {

// A wait that takes longer naps, and notices the end late by a hundredth of it or so.
constexpr std::chrono::milliseconds patience{20};
constexpr std::chrono::milliseconds longest_nap{1};

}  // namespace

Request::~Request() {
    if (on && state.load(std::memory_order_acquire) == pending) {
        leak();
    }
}

int Request::test() {
    const int now = state.load(std::memory_order_acquire);
    if (now != pending) {
        return now;
    }
    if (!library.try_lock() && !library.try_lock_for(std::chrono::milliseconds(50))) {
        return pending;
    }
    const std::lock_guard<std::timed_mutex> held(library, std::adopt_lock);
    return test_locked();
}

void Request::leak() {
    new ccl::event(std::move(event));
    new Communicator(std::move(on));
    unfinished = true;
}

int Request::test_locked() {
    int now = state.load(std::memory_order_acquire);
    if (now != pending || stopped) {
        return now;
    }
    try {
        if (!event.test()) {
            return pending;
        }
        // The end of either is a call into oneCCL.
        event = ccl::event();
        on.reset();
        ended_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
        now = complete;
    } catch (const std::exception &problem) {
        error = problem.what();
        now = failed;
        leak();
    }
    under_way.fetch_sub(1, std::memory_order_relaxed);
    state.store(now, std::memory_order_release);
    return now;
}

int wait_for(Request &request, double seconds) {
    int state = request.test();
    if (state != pending || seconds <= 0) {
        return state;
    }
    waiting.fetch_add(1, std::memory_order_relaxed);
    const auto begin = Clock::now();
    const auto end = begin + std::chrono::duration<double>(seconds);
    // Python waits in slices. Threads that wait for the same request differ by little.
    Clock::duration first{};
    request.awaited_since.compare_exchange_strong(first, begin.time_since_epoch());
    const Clock::time_point since{first == Clock::duration{} ? begin.time_since_epoch() : first};
    for (unsigned tries = 1; state == pending; ++tries) {
        state = request.test();
        if (ranks_share_cores) {
            sched_yield();
        }
        if (tries % 64 == 0) {
            const auto now = Clock::now();
            if (now >= end) {
                break;
            }
            if (now - since >= patience) {
                tries = 63;  // a look a nap
                std::this_thread::sleep_for(std::min<Clock::duration>((now - since) / 100, longest_nap));
            }
        }
    }
    waiting.fetch_sub(1, std::memory_order_relaxed);
    return state;
}

}  // namespace oneccl
