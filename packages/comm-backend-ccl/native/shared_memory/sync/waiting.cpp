// How a rank waits: it looks, and then sleeps until others wake it.

#include "progress/group.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <climits>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace shm {

namespace {

using Clock = std::chrono::steady_clock;

// Not FUTEX_PRIVATE_FLAG: other processes wake.
void futex_wait(std::atomic<uint32_t> &futex, uint32_t seen, double seconds) {
    const timespec limit{static_cast<time_t>(seconds),
                         static_cast<long>((seconds - static_cast<time_t>(seconds)) * 1e9)};
    syscall(SYS_futex, &futex, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t> &futex) { syscall(SYS_futex, &futex, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

}  // namespace

// Where ranks share cores, one that waits keeps another from running that it waits for. Where each has a core, the
// scheduler may put two on one of them for a while, as they wake up, say. Ranks say on which core they wait: as they
// take turns there, one of two sees the other at its second wait.
bool Group::keeps_a_peer_from_running(bool for_message) {
    constexpr auto relaxed = std::memory_order_relaxed;
    const auto core = static_cast<uint32_t>(sched_getcpu() + 1);  // 0 where the kernel cannot tell
    // The others read this line at every look.
    if (posts_[rank_].core.load(relaxed) != core) {
        posts_[rank_].core.store(core, relaxed);
    }
    const auto steps = static_cast<uint32_t>(word(rank_).load(relaxed));
    // A rank that never waits does not say when it moves. One that is here runs during a yield.
    const bool doubts = !oversubscribed_ && yields_.load(relaxed) >= most_yields;
    for (int other = 0; core != 0 && other < size(); ++other) {
        const uint32_t theirs = other == rank_ ? 0 : posts_[other].core.load(relaxed);
        std::atomic<uint32_t> &doubted = doubted_cores_[static_cast<size_t>(other)];
        if (theirs != core || doubted.load(relaxed) == core) {
            if (doubted.load(relaxed) != 0 && doubted.load(relaxed) != theirs) {
                doubted.store(0, relaxed);
            }
            continue;
        }
        // Those that have come as far as this rank have nothing that it waits for.
        const auto done = static_cast<uint32_t>(word(other).load(relaxed));
        if (!for_message && static_cast<int32_t>(done - steps) >= 0) {
            continue;
        }
        if (!doubts) {
            return true;
        }
        doubted.store(core, relaxed);
    }
    return false;
}

// A rank on another core is often about to post: giving this core away and getting it back takes longer than a few
// looks. One that shares the core posts only if it gets it.
bool Group::relax(bool for_message) {
    const uint32_t looked = looked_.load(std::memory_order_relaxed) + 1;
    looked_.store(looked, std::memory_order_relaxed);
    const uint32_t between = oversubscribed_ ? 2 : 16;
    if (looked % between == 0 &&
        (keeps_a_peer_from_running(for_message) || (oversubscribed_ && looked >= most_looks))) {
        looked_.store(0, std::memory_order_relaxed);
        yields_.store(yields_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        sched_yield();
        return true;
    }
#ifdef __x86_64__
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // what `yield` promises, on cores that take that for nothing
#endif
    return false;
}

void Group::has_found() {
    if (looked_.load(std::memory_order_relaxed) != 0) {
        looked_.store(0, std::memory_order_relaxed);
    }
    if (yields_.load(std::memory_order_relaxed) != 0) {
        yields_.store(0, std::memory_order_relaxed);
    }
}

void Group::wake(int other) {
    bells_[other].rings.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(bells_[other].rings);
}

void Group::wake_sleepers() {
    const uint64_t sleeping = header_->sleeping.load(std::memory_order_seq_cst);
    for (int other = 0; other < size(); ++other) {
        if (other != rank_ && sleeping >> other & 1 &&
            enough_for(other, bells_[other].awaited.load(std::memory_order_seq_cst))) {
            wake(other);
        }
    }
}

// Whether what `other` waits for has come. Of several ranks that post at once, the last to look sees all words.
bool Group::enough_for(int other, uint64_t awaited) {
    if (!(awaited & needs_all)) {
        return true;
    }
    for (int one = 0; one < size(); ++one) {
        if (one != other && static_cast<int32_t>(static_cast<uint32_t>(word(one).load(std::memory_order_seq_cst)) -
                                                 static_cast<uint32_t>(awaited)) < 0) {
            return false;
        }
    }
    return true;
}

void Group::ring(int other) {
    if (header_->sleeping.load(std::memory_order_seq_cst) >> other & 1) {
        wake(other);
    }
}

void Group::wake_here() { wake(rank_); }

// Posts matter to the operation at the head of the queue alone; messages ring whatever is awaited.
void Group::sleep(Task &task, double seconds) {
    const uint32_t seen = bells_[rank_].rings.load(std::memory_order_seq_cst);
    const auto awaited_now = [this] { return collectives_.empty() ? 0 : collectives_.front()->awaits; };
    uint32_t awaited;
    {
        const std::lock_guard<std::mutex> alone(lock_);
        if (task.now() != pending || closed()) {
            return;
        }
        awaited = awaited_now();
    }
    {
        const std::lock_guard<std::mutex> alone(sleep_mutex_);
        ++sleepers_;
        bells_[rank_].awaited.store(awaited != 0 ? needs_all | awaited : 0, std::memory_order_seq_cst);
        header_->sleeping.fetch_or(uint64_t{1} << rank_, std::memory_order_seq_cst);
        // Before the words of others are looked at again, in the order of the language as well.
        std::atomic_thread_fence(std::memory_order_seq_cst);
    }
    bool go_on;
    {
        const std::lock_guard<std::mutex> alone(lock_);
        advance_all();
        go_on = task.now() != pending || awaited_now() != awaited || closed();
    }
    flight::refine_clock();
    if (!go_on) {
        futex_wait(bells_[rank_].rings, seen, seconds);
    }
    const std::lock_guard<std::mutex> alone(sleep_mutex_);
    if (--sleepers_ == 0) {
        header_->sleeping.fetch_and(~(uint64_t{1} << rank_), std::memory_order_seq_cst);
    }
}

int Group::wait(Task &task, double seconds) {
    if (task.now() != pending) {
        return task.now();
    }
    if (seconds <= 0) {
        if (lock_.try_lock()) {
            const std::lock_guard<std::mutex> alone(lock_, std::adopt_lock);
            advance_all();
        }
        return task.now();
    }
    attended_.fetch_add(1, std::memory_order_seq_cst);
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    const bool is_message = task.request.operation == send || task.request.operation == receive;
    int state;
    for (int look = 0; (state = task.now()) == pending;) {
        if (look < spins()) {
            if (lock_.try_lock()) {
                const std::lock_guard<std::mutex> alone(lock_, std::adopt_lock);
                if (task.now() == pending) {
                    const uint32_t before = done_;
                    advance_all();
                    if (done_ != before || task.now() != pending) {
                        look = 0;
                        has_found();
                    }
                }
            }
            if (task.now() == pending && (relax(is_message) || !oversubscribed_)) {
                ++look;
            }
            continue;
        }
        const double left = std::chrono::duration<double>(end - Clock::now()).count();
        if (left <= 0) {
            break;
        }
        if (closed()) {
            const timespec nap{0, 10000000};
            nanosleep(&nap, nullptr);
            continue;
        }
        sleep(task, left);
    }
    if (attended_.fetch_sub(1, std::memory_order_seq_cst) == 1) {
        const std::lock_guard<std::mutex> alone(lock_);
        if (!collectives_.empty() || under_way_ > 0) {
            worker_.notify();
        }
    }
    return state;
}

}  // namespace shm
