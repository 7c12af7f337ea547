#include "group.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdexcept>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace shm {

namespace {

using Clock = std::chrono::steady_clock;

// Of posts; a clock takes as long as a small operation.
constexpr uint32_t timed_one_in = 32;

// Not FUTEX_PRIVATE_FLAG: other processes wake.
void futex_wait(std::atomic<uint32_t> &futex, uint32_t seen, double seconds) {
    const timespec limit{static_cast<time_t>(seconds), static_cast<long>((seconds - static_cast<time_t>(seconds)) * 1e9)};
    syscall(SYS_futex, &futex, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t> &futex) { syscall(SYS_futex, &futex, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

uint32_t mixed(uint32_t before, uint64_t a, uint64_t b) {
    uint64_t hash = (before ^ a) * 0x9e3779b97f4a7c15u;
    hash = (hash ^ (hash >> 29) ^ b) * 0xbf58476d1ce4e5b9u;
    return static_cast<uint32_t>(hash >> 32);
}

constexpr const char *names[operations] = {"all_reduce", "reduce", "broadcast", "all_gather",
                                           "reduce_scatter", "all_to_all", "all_to_all_v", "send",
                                           "recv", "gather", "scatter", "barrier"};
constexpr const char *dtype_names[dtypes] = {"int8", "uint8", "int16", "uint16", "int32", "uint32", "int64",
                                             "uint64", "float16", "float32", "float64", "bfloat16", "bool"};
constexpr const char *op_names[ops] = {"sum", "product", "min", "max", "avg", "band", "bor", "bxor"};

bool is_reduction(int operation) {
    return operation == all_reduce || operation == reduce || operation == reduce_scatter;
}

std::string described(const Call &call) {
    if (call.operation >= operations || call.dtype >= dtypes || call.op >= ops) {
        return "something else";
    }
    std::string text = names[call.operation];
    if (call.operation == barrier) {
        return text;
    }
    text += "(";
    if (call.operation != all_to_all_v) {
        text += std::to_string(call.count) + " x ";
    }
    text += dtype_names[call.dtype];
    if (is_reduction(call.operation)) {
        text += std::string(", ") + op_names[call.op];
    }
    if (call.root >= 0) {
        text += ", root " + std::to_string(call.root);
    }
    return text + ")";
}

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
        const std::lock_guard<std::mutex> alone(desk_);
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
        if (task->published) {
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

void Group::relax() const {
    if (crowded_) {
        sched_yield();
        return;
    }
#ifdef __x86_64__
    _mm_pause();
#endif
}

// --- flags

Record &Group::begin(const Request &request, Call &call) {
    call.number = ++number_;
    call.operation = request.operation;
    call.dtype = request.dtype;
    call.op = request.op;
    call.root = request.root;
    call.count = request.count;
    fingerprint_ = mixed(fingerprint_, call.operation | call.dtype << 8 | call.op << 16 |
                                           static_cast<uint64_t>(static_cast<uint32_t>(call.root)) << 32,
                         call.count);
    call.fingerprint = fingerprint_;
    Record &record = record_of(rank_, call.number);
    record.call = call;
    return record;
}

void Group::post(uint32_t fingerprint) {
    ++done_;
    ++steps_;
    posted_[done_ % records] = fingerprint;
    // An exchange is a full fence: whoever falls asleep sees this word, or is seen in `sleeping`.
    const uint64_t word = static_cast<uint64_t>(fingerprint) << 32 | done_;
    if (done_ % timed_one_in != 0) {
        posts_[rank_].word.exchange(word, std::memory_order_seq_cst);
    } else {
        // Without what is still to be written before it.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        const auto begin = Clock::now();
        posts_[rank_].word.exchange(word, std::memory_order_seq_cst);
        writer_.learn(Clock::now() - begin);
    }
    if (header_->sleeping.load(std::memory_order_seq_cst) & ~(uint64_t{1} << rank_)) {
        wake_sleepers();
    }
}

void Group::wake_sleepers() {
    const uint64_t sleeping = header_->sleeping.load(std::memory_order_seq_cst);
    for (int other = 0; other < size(); ++other) {
        if (other != rank_ && sleeping >> other & 1 &&
            enough_for(other, bells_[other].awaited.load(std::memory_order_seq_cst))) {
            bells_[other].rings.fetch_add(1, std::memory_order_seq_cst);
            futex_wake(bells_[other].rings);
        }
    }
}

// Whether what `other` waits for has come. Of several ranks that post at once, the last to look sees all words.
bool Group::enough_for(int other, uint64_t awaited) {
    if (!(awaited & needs_all)) {
        return true;
    }
    for (int one = 0; one < size(); ++one) {
        if (one != other &&
            static_cast<int32_t>(static_cast<uint32_t>(word(one).load(std::memory_order_seq_cst)) -
                                 static_cast<uint32_t>(awaited)) < 0) {
            return false;
        }
    }
    return true;
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
        last = std::max(last, shown_at_[index % pieces]);
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
    } catch (const Problem &) {
        fail(no_memory, rank_, number_);
        throw;
    }
    ring_is_reserved_ = true;
}

bool Group::has_come(int other, uint32_t steps, const Call &call, uint32_t begun) {
    const uint64_t seen = word(other).load(std::memory_order_acquire);
    const uint32_t posted = static_cast<uint32_t>(seen);
    if (static_cast<uint32_t>(seen >> 32) == call.fingerprint) {
        return static_cast<int32_t>(posted - steps) >= 0;
    }
    if (static_cast<int32_t>(posted - begun) <= 0) {
        return false;  // in an earlier operation
    }
    // In a later one, or in another than ours.
    const Call &theirs = record_of(other, call.number).call;
    if (theirs.number == call.number && theirs.fingerprint == call.fingerprint) {
        return true;
    }
    fail(different_calls, other, call.number);
    return false;
}

bool Group::all_have_come(uint32_t steps, const Call &call, uint32_t begun) {
    for (int other = 0; other < size(); ++other) {
        if (other != rank_ && !has_come(other, steps, call, begun)) {
            return false;
        }
    }
    return true;
}

void Group::fail(Failure kind, int other, uint64_t number) {
    // Ranks that only gave may have gone on after the first call that differed.
    while (kind == different_calls && number > 1) {
        const Call &mine = record_of(rank_, number - 1).call, &theirs = record_of(other, number - 1).call;
        if (mine.number != number - 1 || theirs.number != number - 1 || mine.fingerprint == theirs.fingerprint) {
            break;
        }
        --number;
    }
    uint64_t none = 0;
    header_->failure.compare_exchange_strong(none,
                                             failed_mark | static_cast<uint64_t>(kind) << 60 |
                                                 static_cast<uint64_t>(rank_) << 54 |
                                                 static_cast<uint64_t>(other) << 48 | number,
                                             std::memory_order_seq_cst);
    for (int one = 0; one < size(); ++one) {
        bells_[one].rings.fetch_add(1, std::memory_order_seq_cst);
        futex_wake(bells_[one].rings);
    }
}

std::string Group::failure() {
    const uint64_t failure = header_->failure.load(std::memory_order_acquire);
    if (failure == 0) {
        return closed() ? "the group was destroyed" : "";
    }
    const uint64_t number = failure & ((uint64_t{1} << 48) - 1);
    const int finder = static_cast<int>(failure >> 54 & 63), other = static_cast<int>(failure >> 48 & 63);
    const auto kind = static_cast<Failure>(failure >> 60 & 7);
    if (kind == different_sizes) {
        return "rank " + std::to_string(finder) + " and rank " + std::to_string(other) +
               " disagree about how much the one sends to the other";
    }
    if (kind == gave_up) {
        return "rank " + std::to_string(finder) + " gave up; its own error says why";
    }
    if (kind == no_memory) {
        return "rank " + std::to_string(finder) + " has not enough shared memory; its own error says how much is needed";
    }
    if (kind == unreachable) {
        return "rank " + std::to_string(finder) + " cannot map the shared memory of rank " + std::to_string(other) +
               "; too many open files or mappings (ulimit -n, vm.max_map_count)";
    }
    const Call &theirs = record_of(other, number).call;
    std::string text = "operation " + std::to_string(number) + " of the group is " +
                       described(record_of(finder, number).call) + " on rank " + std::to_string(finder) + " and ";
    text += theirs.number == number ? described(theirs) : "something else";
    return text + " on rank " + std::to_string(other);
}

// --- sleeping

void Group::ring(int other) {
    if (header_->sleeping.load(std::memory_order_seq_cst) >> other & 1) {
        bells_[other].rings.fetch_add(1, std::memory_order_seq_cst);
        futex_wake(bells_[other].rings);
    }
}

void Group::wake_here() {
    bells_[rank_].rings.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(bells_[rank_].rings);
}

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
        const std::lock_guard<std::mutex> alone(bed_);
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
    if (!go_on) {
        futex_wait(bells_[rank_].rings, seen, seconds);
    }
    const std::lock_guard<std::mutex> alone(bed_);
    if (--sleepers_ == 0) {
        header_->sleeping.fetch_and(~(uint64_t{1} << rank_), std::memory_order_seq_cst);
    }
}

// --- operations

void Group::check(const Request &request) const {
    if (request.operation >= operations || request.dtype >= dtypes) {
        throw std::invalid_argument("unknown operation or dtype");
    }
    if (is_reduction(request.operation) && !reduces(request.dtype, request.op)) {
        throw std::invalid_argument(std::string(op_names[request.op < ops ? request.op : 0]) + " of " +
                                    dtype_names[request.dtype] + " cannot be reduced");
    }
    const bool rooted = request.operation == reduce || request.operation == broadcast || request.operation == gather ||
                        request.operation == scatter || request.operation == send || request.operation == receive;
    if (rooted && (request.root < 0 || request.root >= size())) {
        throw std::invalid_argument("rank " + std::to_string(request.root) + " is not in a group of " +
                                    std::to_string(size()));
    }
    if ((request.operation == send || request.operation == receive) && request.root == rank_) {
        throw std::invalid_argument("a message to this rank itself");
    }
    const size_t ranks = static_cast<size_t>(size());
    if (request.operation == all_to_all_v &&
        (request.input_counts.size() != ranks || request.output_counts.size() != ranks)) {
        throw std::invalid_argument("all_to_all_v needs a size for each rank");
    }
}

void Group::finish(Task &task, State state) { task.state.store(state, std::memory_order_release); }

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
        } catch (const Problem &) {
            fail(no_memory, rank_, number_);
            throw;
        }
        messages_[peer].reserved = true;
    }
    Handle task = make_task(*this, std::move(request));
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
    int state;
    for (int look = 0; (state = task.now()) == pending; ++look) {
        if (look < spins()) {
            if (lock_.try_lock()) {
                const std::lock_guard<std::mutex> alone(lock_, std::adopt_lock);
                if (task.now() == pending) {
                    const uint32_t before = done_;
                    advance_all();
                    look = done_ == before ? look : 0;
                }
            }
            relax();
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
            hand_to_worker(false);
        }
    }
    return state;
}

void Group::reserve_channel(int to) {
    if (descriptor_ >= 0) {
        reserve_memory(descriptor_, layout_.messages + (static_cast<size_t>(rank_) * layout_.size + to) *
                                                           layout_.channel_bytes(),
                       layout_.channel_bytes(), "sending to another rank");
    }
}

// --- the thread that looks after what nobody waits for

void Group::hand_to_worker(bool make) {
    const std::lock_guard<std::mutex> alone(desk_);
    if (stop_ || (!make && !worker_.joinable())) {
        return;
    }
    if (!worker_.joinable()) {
        worker_ = std::thread([this] { work(); });
    }
    has_work_ = true;
    work_.notify_one();
}

void Group::work() {
    pthread_setname_np(pthread_self(), "comm-shm");
    while (true) {
        {
            std::unique_lock<std::mutex> alone(desk_);
            work_.wait(alone, [this] { return stop_ || has_work_; });
            if (stop_) {
                return;
            }
            has_work_ = false;
        }
        while (!closed()) {
            Handle next;
            {
                const std::lock_guard<std::mutex> alone(lock_);
                if (!advance_all()) {
                    break;
                }
                if (attended_.load(std::memory_order_seq_cst) > 0) {
                    break;  // who waits makes progress for all, and hands back what is left
                }
                if (!collectives_.empty()) {
                    next = collectives_.front();
                } else {
                    for (Messages &peer : messages_) {
                        for (auto *queue : {&peer.sending, &peer.receiving}) {
                            next = queue->empty() ? next : queue->front();
                        }
                    }
                }
            }
            if (next) {
                sleep(*next, 0.1);
            }
        }
    }
}

}  // namespace shm
