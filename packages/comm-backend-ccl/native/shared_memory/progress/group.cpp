#include "progress/group.hpp"

#include "segment/arena.hpp"
#include "segment/memory.hpp"

#include <time.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace shm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t usual_cache_share = size_t{16} << 20;

// Every rank but `rank` once: one left out would leave a hole in a result.
std::vector<int> checked_order(std::vector<int> order, int size, int rank) {
    if (order.empty()) {
        for (int turn = 1; turn < size; ++turn) {
            order.push_back((rank + turn) % size);
        }
    }
    std::vector<int> sorted = order;
    sorted.push_back(rank);
    std::sort(sorted.begin(), sorted.end());
    for (size_t one = 0; one < sorted.size(); ++one) {
        if (sorted.size() != static_cast<size_t>(size) || sorted[one] != static_cast<int>(one)) {
            throw std::invalid_argument("shared memory: an order that is not of all other ranks");
        }
    }
    return order;
}

}  // namespace

Group::Group(void *segment, int descriptor, int size, int rank, std::vector<int> pids, bool oversubscribed, bool owned,
             std::vector<int> reading_order, size_t cache_share, Settings settings)
    : segment_(static_cast<char *>(segment)), layout_(size), header_(at<Header>(0)), posts_(at<Post>(layout_.posts)),
      bells_(at<Bell>(layout_.bells)), descriptor_(descriptor), rank_(rank), pids_(std::move(pids)),
      reading_order_(checked_order(std::move(reading_order), size, rank)), oversubscribed_(oversubscribed),
      owned_(owned), cache_share_(cache_share == 0 ? usual_cache_share : cache_share),
      sends_(static_cast<size_t>(size)), inbox_(size),
      tuner_(size, rank, pids_, at<Identity>(layout_.identities), at<CallTimes>(layout_.call_times),
             layout_.ring_bytes(), settings) {
    fingerprint_ = settings.code();
    if (rank == 0) {
        header_->oversubscribed.store(oversubscribed ? 1 : 0, std::memory_order_relaxed);
    }
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
    worker_.stop();
    closed_.store(true, std::memory_order_release);
    wake_here();
    worker_.join();
    const std::lock_guard<std::mutex> alone(lock_);
    for (const Handle &task : collectives_) {
        if (task->exposed) {
            // Others must not go on with the tensor, which its owner takes for its own again.
            if (!broken()) {
                fail(gave_up, rank_, number_);
            }
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
    return missing_for(task);
}

uint64_t Group::missing() {
    const std::lock_guard<std::mutex> alone(lock_);
    return missing_now();
}

uint64_t Group::missing_now() {
    if (!collectives_.empty()) {
        return missing_for(*collectives_.front());
    }
    uint64_t found = inbox_.awaited(everyone() & ~(uint64_t{1} << rank_));
    for (size_t peer = 0; peer < sends_.size(); ++peer) {
        if (!sends_[peer].queue.empty()) {
            found |= uint64_t{1} << peer;
        }
    }
    return found;
}

uint64_t Group::missing_for(const Task &task) {
    if (task.request.operation == send || task.request.operation == receive) {
        const int source = task.source.load(std::memory_order_relaxed);
        const int peer = task.request.root == any_source ? source : task.request.root;
        return peer >= 0 ? uint64_t{1} << peer : everyone() & ~(uint64_t{1} << rank_);
    }
    if (collectives_.empty()) {
        return everyone();
    }
    if (collectives_.front().get() != &task) {
        return missing_for(*collectives_.front());  // it has not begun, and nobody knows who will come then
    }
    if (task.awaits == 0) {
        return task.awaited_rank >= 0 ? uint64_t{1} << task.awaited_rank : everyone();
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

std::vector<Tuner::Known> Group::known_methods() {
    const std::lock_guard<std::mutex> alone(lock_);
    return tuner_.known();
}

void Group::start_from(std::vector<Tuner::Prior> priors) {
    const std::lock_guard<std::mutex> alone(lock_);
    tuner_.start_from(std::move(priors));
}

void Group::time_out() {
    const std::lock_guard<std::mutex> alone(lock_);
    if (broken() || closed() || (collectives_.empty() && under_way_ == 0)) {
        return;
    }
    at<Difference>(layout_.differences)[rank_].missing = missing_now();
    fail(timed_out, rank_, number_);
}

bool Group::has_timed_out(int &finder, uint64_t &missing) {
    const uint64_t failure = header_->failure.load(std::memory_order_acquire);
    if (failure == 0 || static_cast<Failure>(failure >> 60 & 7) != timed_out) {
        return false;
    }
    finder = static_cast<int>(failure >> 54 & 63);
    missing = at<Difference>(layout_.differences)[finder].missing;
    return true;
}

void Group::reserve_ring() {
    if (ring_is_reserved()) {
        return;
    }
    const size_t mine = layout_.rings + static_cast<size_t>(rank_) * layout_.all_ring_bytes();
    try {
        reserve_memory(descriptor_, mine, layout_.all_ring_bytes(), "a group with large tensors");
    } catch (const SharedMemoryError &) {
        fail(no_memory, rank_, number_);
        throw;
    }
    map_pages(piece(rank_, 0), layout_.all_ring_bytes(), true);
    ring_is_reserved_ = true;
}

void Group::map_peers() {
    for (const int one : reading_order_) {
        map_pages(piece(one, 0), layout_.all_ring_bytes(), false);
    }
    has_mapped_peers_ = true;
}

// --- operations

void Group::finish(Task &task, State state) {
    if (task.watched) {
        const auto now = Clock::now().time_since_epoch();
        task.ended_ns.store(std::chrono::nanoseconds(now).count(), std::memory_order_relaxed);
    }
    if (state != pending) {
        task.recorded.end(state == failed);
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
        if (task->exposed) {
            // Late ranks write into the tensors of an all_reduce in place. Where nobody learns of the end, nobody uses
            // them.
            const Request &request = task->request;
            const bool is_written = request.operation == all_reduce && request.input == request.output;
            Arena::instance().retire(request.input, is_written && state == failed ? request.bytes() : 0);
        }
        finish(*task, state);
    }
    collectives_.clear();
    for (Sends &peer : sends_) {
        for (const Handle &task : peer.queue) {
            finish(*task, state);
        }
        peer.queue.clear();
    }
    inbox_.clear([&](Task &task) { finish(task, state); });
    under_way_ = 0;
}

// Returns whether something is left to do. The caller holds the lock.
bool Group::advance_all() try {
    bool ended = false;
    while (!collectives_.empty() && advance(collectives_.front())) {
        tuner_.end(steps_);
        collectives_.pop_front();
        ended = true;
    }
    if (under_way_ > 0) {
        for (Sends &peer : sends_) {
            while (!peer.queue.empty() && advance(peer.queue.front())) {
                peer.queue.pop_front();
                --under_way_;
                ended = true;
            }
        }
        const int received = inbox_.advance(*this);
        under_way_ -= received;
        ended = ended || received > 0;
    }
    if (broken()) {
        end_all(failed);
        ended = true;
    }
    if (ended && header_->sleeping.load(std::memory_order_relaxed) >> rank_ & 1) {
        wake_here();  // another thread may wait for what has ended
    }
    return !collectives_.empty() || under_way_ > 0;
} catch (const std::exception &) {
    // An operation that has begun cannot be begun again, and the other ranks wait for it.
    fail(no_memory, rank_, number_);
    end_all(failed);
    return false;
}

Handle Group::start(Request request, bool watched, std::unique_ptr<const Passed> passed) {
    check(request);
    const std::lock_guard<std::mutex> alone(lock_);
    if (closed()) {
        throw std::invalid_argument("the group was destroyed");
    }
    if (broken()) {
        throw std::invalid_argument(failure());
    }
    const int operation = request.operation, peer = request.root;
    if (operation == send && !sends_[static_cast<size_t>(peer)].reserved) {
        try {
            reserve_channel(peer);
        } catch (const SharedMemoryError &) {
            fail(no_memory, rank_, number_);
            throw;
        }
        sends_[static_cast<size_t>(peer)].reserved = true;
    }
    if (watched) {
        worker_.start();  // it may fail, so before the operation is this rank's part in something
    }
    Handle task = make_task(*this, std::move(request));
    task->watched = watched;
    task->passed = std::move(passed);
    if (operation != send && operation != receive) {
        collectives_.push_back(task);
    }
    task->recorded = record(task->request, watched);
    if (operation == send) {
        sends_[static_cast<size_t>(peer)].queue.push_back(task);
        ++under_way_;
    } else if (operation == receive) {
        under_way_ += inbox_.post(*this, task) ? 0 : 1;
    }
    advance_all();
    if (watched && task->now() == pending) {
        worker_.notify();
    }
    return task;
}

// One turn of the progress thread.
bool Group::work() {
    Handle next;
    {
        const std::lock_guard<std::mutex> alone(lock_);
        // Who waits makes progress for all, and hands back what is left.
        if (closed() || !advance_all() || attended_.load(std::memory_order_seq_cst) > 0) {
            return false;
        }
        if (!collectives_.empty()) {
            next = collectives_.front();
        } else {
            next = inbox_.first();
            for (Sends &peer : sends_) {
                next = peer.queue.empty() ? next : peer.queue.front();
            }
        }
    }
    if (next) {
        sleep(*next, 0.1);
    }
    return !closed();
}

void Group::reserve_channel(int to) {
    if (descriptor_ >= 0) {
        reserve_memory(descriptor_,
                       layout_.messages + (static_cast<size_t>(rank_) * layout_.size + to) * layout_.channel_bytes(),
                       layout_.channel_bytes(), "sending to another rank");
    }
}

}  // namespace shm
