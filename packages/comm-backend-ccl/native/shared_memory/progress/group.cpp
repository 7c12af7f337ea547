#include "progress/group.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <time.h>
#include <unistd.h>

namespace shm {

namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

Group::Group(void *segment, int descriptor, int size, int rank, std::vector<int> pids, bool crowded, bool owned)
    : segment_(static_cast<char *>(segment)), layout_(size), header_(at<Header>(0)), posts_(at<Post>(layout_.posts)),
      bells_(at<Bell>(layout_.bells)), descriptor_(descriptor), rank_(rank), pids_(std::move(pids)), crowded_(crowded),
      owned_(owned), messages_(static_cast<size_t>(size)) {
    if (descriptor >= 0) {
        reserve_memory(descriptor, layout_.slots_at + static_cast<size_t>(rank) * slots * slot_bytes,
                       slots * slot_bytes, "a group");
    }
}

Group::~Group() {
    close();
    if (owned_) {
        unmap_memory(segment_, layout_.end);
        ::close(descriptor_);
    }
}

void Group::close(bool quietly) {
    std::thread worker;
    {
        const std::lock_guard<std::mutex> alone(worker_mutex_);
        stop_ = true;
        worker.swap(worker_);  // of several threads that close, one joins it
        work_.notify_all();
    }
    closed_.store(true, std::memory_order_release);
    wake_here();
    if (worker.joinable()) {
        worker.join();
    }
    const std::lock_guard<std::mutex> alone(lock_);
    for (const Handle &task : collectives_) {
        if (task->exposed) {
            // Others must not go on with the tensor, which its owner takes for its own again.
            if (!broken()) {
                fail(gave_up, rank_, number_);
            }
            Arena::instance().retire(task->request.input);
        }
    }
    end_all(quietly ? pending : failed);
}

void Group::drain(double seconds) {
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    while (Clock::now() < end && attended_.load(std::memory_order_relaxed) == 0) {
        {
            const std::lock_guard<std::mutex> alone(lock_);
            if (closed() || !advance_all()) {
                return;
            }
        }
        const timespec nap{0, 500000};
        nanosleep(&nap, nullptr);
    }
}

uint64_t Group::missing(const Task &task) {
    const std::lock_guard<std::mutex> alone(lock_);
    const uint64_t everyone = size() == 64 ? ~uint64_t{0} : (uint64_t{1} << size()) - 1;
    if (collectives_.empty() || collectives_.front().get() != &task) {
        return everyone;
    }
    if (task.awaits == 0) {
        return task.awaited_rank >= 0 ? uint64_t{1} << task.awaited_rank : everyone;
    }
    uint64_t found = 0;
    for (int one = 0; one < size(); ++one) {
        const auto steps = static_cast<uint32_t>(word(one).load(std::memory_order_acquire));
        if (one != rank_ && static_cast<int32_t>(steps - task.awaits) < 0) {
            found |= uint64_t{1} << one;
        }
    }
    return found;
}

// --- flags

void Group::post(uint32_t fingerprint) {
    ++done_;
    ++steps_;
    posted_[done_ % records] = fingerprint;
    // An exchange is a full fence: whoever falls asleep sees this word, or is seen in `sleeping`.
    const uint64_t word = static_cast<uint64_t>(fingerprint) << 32 | done_;
    writer_.flag([&] { posts_[rank_].word.exchange(word, std::memory_order_seq_cst); });
    if (header_->sleeping.load(std::memory_order_seq_cst) & ~(uint64_t{1} << rank_)) {
        wake_sleepers();
    }
}

bool Group::look_for_slowest(uint32_t needed) {
    uint32_t slowest = done_;
    for (int other = 0; other < size(); ++other) {
        const uint64_t seen = word(other).load(std::memory_order_acquire);
        const uint32_t steps = static_cast<uint32_t>(seen);
        if (other == rank_ || static_cast<int32_t>(steps - slowest) >= 0) {
            continue;
        }
        slowest = steps;
        // A rank that others never have to wait for learns here that it called something else.
        if (steps != 0 && done_ - steps < records && static_cast<uint32_t>(seen >> 32) != posted_[steps % records]) {
            fail(different_calls, other, number_);
        }
    }
    slowest_ = slowest;
    return static_cast<int32_t>(slowest - needed) >= 0;
}

bool Group::pieces_are_free(uint32_t first, uint32_t count, uint32_t &needed) {
    uint64_t last = 0;
    for (uint32_t index = first; index < first + count; ++index) {
        last = std::max(last, published_at_[index % pieces]);
    }
    if (steps_ - last >= slots) {
        return true;  // nobody is so far behind
    }
    needed = done_ - static_cast<uint32_t>(steps_ - last) + 3;
    return static_cast<int32_t>(slowest_ - needed) >= 0 || look_for_slowest(needed);
}

void Group::reserve_ring() {
    if (ring_is_reserved()) {
        return;
    }
    const size_t mine = layout_.rings + static_cast<size_t>(rank_) * layout_.ring_bytes();
    try {
        reserve_memory(descriptor_, mine, layout_.ring_bytes(), "a group with large tensors");
    } catch (const SharedMemoryError &) {
        fail(no_memory, rank_, number_);
        throw;
    }
    ring_is_reserved_ = true;
}

// --- operations

void Group::finish(Task &task, State state) {
    if (task.watched) {
        const auto now = Clock::now().time_since_epoch();
        task.ended_ns.store(std::chrono::nanoseconds(now).count(), std::memory_order_relaxed);
    }
    task.state.store(state, std::memory_order_release);
}

bool Group::advance(const Handle &task) {
    if (!task->advance(*this)) {
        return false;
    }
    finish(*task, complete);
    return true;
}

void Group::end_all(State state) {
    for (const Handle &task : collectives_) {
        finish(*task, state);
    }
    collectives_.clear();
    for (Messages &peer : messages_) {
        for (auto *queue : {&peer.sending, &peer.receiving}) {
            for (const Handle &task : *queue) {
                finish(*task, state);
            }
            queue->clear();
        }
    }
    under_way_ = 0;
}

// Returns whether something is left to do. The caller holds the lock.
bool Group::advance_all() {
    bool ended = false;
    while (!collectives_.empty() && advance(collectives_.front())) {
        collectives_.pop_front();
        ended = true;
    }
    if (under_way_ > 0) {
        for (Messages &peer : messages_) {
            for (auto *queue : {&peer.sending, &peer.receiving}) {
                while (!queue->empty() && advance(queue->front())) {
                    queue->pop_front();
                    --under_way_;
                    ended = true;
                }
            }
        }
    }
    if (broken()) {
        end_all(failed);
        ended = true;
    }
    if (ended && header_->sleeping.load(std::memory_order_relaxed) >> rank_ & 1) {
        wake_here();  // another thread may wait for what has ended
    }
    return !collectives_.empty() || under_way_ > 0;
}

Handle Group::start(Request request, bool watched) {
    check(request);
    const std::lock_guard<std::mutex> alone(lock_);
    if (closed()) {
        throw std::invalid_argument("the group was destroyed");
    }
    if (broken()) {
        throw std::invalid_argument(failure());
    }
    const int operation = request.operation, peer = request.root;
    if (operation == send && !messages_[peer].reserved) {
        try {
            reserve_channel(peer);
        } catch (const SharedMemoryError &) {
            fail(no_memory, rank_, number_);
            throw;
        }
        messages_[peer].reserved = true;
    }
    Handle task = make_task(*this, std::move(request));
    task->watched = watched;
    if (operation == send || operation == receive) {
        (operation == send ? messages_[peer].sending : messages_[peer].receiving).push_back(task);
        ++under_way_;
    } else {
        collectives_.push_back(task);
    }
    advance_all();
    if (watched && task->now() == pending) {
        hand_to_worker(true);
    }
    return task;
}

void Group::reserve_channel(int to) {
    if (descriptor_ >= 0) {
        reserve_memory(descriptor_, layout_.messages + (static_cast<size_t>(rank_) * layout_.size + to) *
                                                           layout_.channel_bytes(),
                       layout_.channel_bytes(), "sending to another rank");
    }
}

}  // namespace shm
