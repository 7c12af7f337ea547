// A rank's side of a group: its flags, its operations in the order they were started, and how it waits.

#pragma once

#include "kernels/kernels.hpp"
#include "point_to_point/inbox.hpp"
#include "progress/progress_thread.hpp"
#include "recorder/recorder.hpp"
#include "segment/layout.hpp"
#include "segment/peer_windows.hpp"
#include "tuning/streaming_copy.hpp"
#include "tuning/tuner.hpp"

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace shm {

enum Operation : uint8_t {
    all_reduce,
    reduce,
    broadcast,
    all_gather,
    reduce_scatter,
    all_to_all,
    all_to_all_v,
    send,
    receive,
    gather,
    scatter,
    barrier,
    operations,
};

// For messages, and for Python to check its own codes against.
extern const char *const operation_names[operations];
extern const char *const dtype_names[dtypes];
// Dtypes of messages alone, whose codes follow those of the others.
constexpr int message_dtypes = 34;
extern const char *const message_dtype_names[message_dtypes];
extern const char *const op_names[ops];

enum State { pending = 0, complete = 1, failed = 2 };

// What is asked of an operation. Counts are of elements: of the whole tensor for all_reduce, reduce, broadcast and
// messages, of one rank's part for the others.
struct Request {
    uint8_t operation = 0;
    uint8_t dtype = 0, op = 0;
    // Of a message in bytes: the code of its elements' dtype, from `dtypes` on; 0 is `dtype`.
    uint8_t message_dtype = 0;
    int root = -1;           // or the peer of a message, which may be any_source of a receive
    int tag = 0;             // of a message
    uint16_t user_call = 0;  // the recorder's code of the user's call; 0 is the operation
    const void *input = nullptr;
    void *output = nullptr;
    size_t count = 0;
    std::vector<size_t> input_counts, output_counts;  // of all_to_all_v, one for each rank

    size_t bytes() const { return count * item_bytes(dtype); }
    uint8_t announced_dtype() const { return message_dtype == 0 ? dtype : message_dtype; }
};

class Group;

// What a program passed to a collective, where the engine gets something else: a text that follows the description, and
// bits that ranks compare.
struct Passed {
    std::string text;
    uint64_t digest;
};

// An operation under way: steps, each of which can be done once others have come so far.
class Task {
public:
    explicit Task(Request request) : request(std::move(request)) {}
    virtual ~Task() = default;

    // Does as much as can be done now. Returns whether that was all.
    virtual bool advance(Group &group) = 0;

    int now() const { return state.load(std::memory_order_acquire); }

    const Request request;
    std::atomic<int> state{pending};
    // By the steady clock, of what is watched: its end is seldom seen by the caller.
    std::atomic<int64_t> ended_ns{0};
    bool watched = false;
    // Steps that all ranks must have done before it goes on; 0 is anything else.
    uint32_t awaits = 0;
    // The rank that it waits for, where that is one.
    int awaited_rank = -1;
    // Of a receive: whose message it got.
    std::atomic<int> source{-1};
    // Whether others know where its tensor is, and may write to it.
    bool exposed = false;
    flight::Recorded recorded;
    std::unique_ptr<const Passed> passed;
};

using Handle = std::shared_ptr<Task>;

class Group {
public:
    // The segment, of Layout(size).end bytes and zeroed at first, stays the caller's where `owned` is false.
    // `oversubscribed`: ranks share hardware threads, so that who looks in vain gives its own to another process. Ranks
    // may find differently. `reading_order`: the other ranks, near ones first; those after this one where it is empty.
    // Throws std::invalid_argument for anything else. `cache_share`: this rank's part of the last-level cache in bytes;
    // 0 is unknown.
    Group(void *segment, int descriptor, int size, int rank, std::vector<int> pids, bool oversubscribed, bool owned,
          std::vector<int> reading_order = {}, size_t cache_share = 0, Settings settings = {});
    ~Group();
    Group(const Group &) = delete;

    int size() const { return layout_.size; }
    int rank() const { return rank_; }
    const Layout &layout() const { return layout_; }

    // Throws std::invalid_argument for what cannot be done, SharedMemoryError where memory lacks.
    // `watched`: it has to come to an end even if nobody waits for it. `passed` is nullptr where it is the request.
    Handle start(Request request, bool watched, std::unique_ptr<const Passed> passed = nullptr);
    // Does a small operation, looking so often for the others, where nothing is before it; false, with nothing begun,
    // where that is not so. `left` is what is under way then.
    bool run_at_once(Request &request, int looks, Handle &left);
    // The same, or start(): nullptr if it is complete.
    Handle run(Request &&request, int looks);
    // Waits up to `seconds`, and returns the state.
    int wait(Task &task, double seconds);
    // The ranks, as bits, without which an operation, or the next in order, cannot go on.
    uint64_t missing(const Task &task);
    uint64_t missing();
    // Fails what is under way on all ranks, as this one has waited in vain: who comes later learns it at once.
    void time_out();
    // Whether a rank said so; sets which, and for whom it waited.
    bool has_timed_out(int &finder, uint64_t &missing);
    // Lets what nobody waits for come to an end, for a moment.
    void drain(double seconds);
    // Operations under way have failed, and their memory is not touched any more. `quietly`: who waits for them is not
    // told, as the process is ending.
    void close(bool quietly = false);
    bool closed() const { return closed_.load(std::memory_order_acquire); }
    bool broken() const { return header_->failure.load(std::memory_order_acquire) != 0; }
    // What went wrong, for people.
    std::string failure();
    // The index by which the flight recorder knows the group, below `most_recorded`; 0 is unknown.
    void record_as(uint32_t index) { recorded_as_.store(index, std::memory_order_relaxed); }
    static constexpr uint32_t most_recorded = 1u << flight::group_bits;

    // What it has learned about the methods of its operations.
    std::vector<Tuner::Known> known_methods();
    // What others have learned, instead of its own; on all ranks alike, between two operations.
    void start_from(std::vector<Tuner::Prior> priors);

    // The other ranks, in the order in which this one reads from them.
    const std::vector<int> &reading_order() const { return reading_order_; }

    // For a moment between two looks. Where another rank needs this core, it gives the core away, and says so.
    bool relax(bool for_message = false);
    // What was looked for has come.
    void has_found();
    bool oversubscribed() const { return oversubscribed_; }
    // Chunks of what is larger than the ring are as large as they can be; on all ranks alike.
    bool has_large_chunks() const { return header_->oversubscribed.load(std::memory_order_relaxed) != 0; }
    size_t cache_share() const { return cache_share_; }
    int spins() const { return oversubscribed_ ? 50 : 2000; }

    // --- for operations, whose caller holds the lock

    // Gives the operation that begins here its number and fingerprint; others see the record with its first word.
    Record &begin(const Request &request, Call &call, uint8_t method);
    // Later: a segment of the operation is moved so.
    void go_on(size_t segment, uint8_t method) {
        record_of(rank_, number_).call.of_segments[segment % std::size(Call{}.of_segments)] = method;
    }
    // Whether another rank, which has done the step before the segment, moves it alike.
    bool goes_on_alike(int other, uint64_t number, size_t segment);
    // Before it begins: has it compared, and described, with what the program passed.
    void pass(const Passed &passed);
    Record &record_of(int rank, uint64_t number) {
        return at<Record>(layout_.records_at)[static_cast<size_t>(rank) * records + number % records];
    }
    uint64_t *sizes_of(int rank, uint64_t number) {
        return at<uint64_t>(layout_.sizes) +
               (number % records * layout_.size + static_cast<size_t>(rank)) * layout_.size;
    }
    char *slot(int rank, uint32_t step) {
        return at<char>(layout_.slots_at) + (static_cast<size_t>(rank) * slots + step % slots) * slot_bytes;
    }
    char *piece(int rank, uint32_t index) {
        return at<char>(layout_.rings) + static_cast<size_t>(rank) * layout_.all_ring_bytes() +
               index * layout_.piece_bytes;
    }
    // The next pieces of the wide or the near ring, a power of two of them, `times` times.
    uint32_t take_pieces(uint32_t count, uint32_t times, bool near) {
        OwnRing &ring = rings_[near ? 1 : 0];
        const uint32_t first = (ring.next + count - 1) / count * count % ring.count;
        ring.next = (first + count * times) % ring.count;
        return ring.begin + first;
    }
    // Those that were taken, from `first`, at the time `at` of them.
    static uint32_t taken_pieces(uint32_t first, uint32_t count, uint32_t at) {
        // Of these two rings; nothing is taken several times of the third.
        const uint32_t begin = first < pieces ? 0 : pieces, of = first < pieces ? pieces : near_pieces;
        return begin + (first - begin + at % of * count) % of;
    }
    // The next for what is published at once, a power of two of them.
    uint32_t next_pieces(uint32_t count, bool wide) const {
        const OwnRing &ring = rings_[ring_for(count, wide)];
        return ring.begin + (ring.next + count - 1) / count * count % ring.count;
    }
    // As the method says that was chosen.
    uint32_t take_pieces(uint32_t count) {
        const bool is_wide = method_.ring == RingSize::wide;
        const uint32_t first = next_pieces(count, is_wide);
        OwnRing &ring = rings_[ring_for(count, is_wide)];
        ring.next = (first - ring.begin + count) % ring.count;
        return first;
    }
    // Says how the operation that begins now moves `bytes` of each rank.
    const Method &choose_method(const Request &request, size_t bytes, bool is_eager) {
        method_ = tuner_.begin(request, bytes, is_eager, steps_);
        if (!has_mapped_peers_ && tuner_.has_met_all()) {
            map_peers();
        }
        return method_;
    }
    // Of an all_to_all_v before anybody knows how much the others send: as if that were as much as the last time.
    void choose_method_of_parts(const Request &request);
    // The most that a rank sends in the all_to_all_v that is under way, which all ranks know by now.
    void has_seen_parts(size_t most_bytes);
    // Of an operation that is too small for a choice.
    void choose_usual_method() { method_ = tuner_.usual_of_small(); }
    const Method &method() const { return method_; }
    Tuner &tuner() { return tuner_; }
    uint64_t steps() const { return steps_; }
    // Copies what others read.
    void write(void *to, const void *from, size_t bytes) {
        if (method_.transfer == streamed) {
            streaming(into_ring).copy(to, from, bytes);
        } else {
            kernels().show(to, from, bytes);
        }
    }
    StreamingCopy &streaming(Route route) { return streaming_[route]; }
    int pid(int rank) const { return pids_[static_cast<size_t>(rank)]; }
    char *scratch(int peer) const { return tuner_.scratch(peer); }
    // Whether the pieces may be written: what they held was read by all. Sets `needed` to the steps that this takes.
    bool pieces_are_free(uint32_t first, uint32_t count, uint32_t &needed);
    void mark_pieces(uint32_t first, uint32_t count) {
        for (uint32_t index = first; index < first + count; ++index) {
            published_at_[index] = steps_;
        }
    }
    // Makes sure that there is room for what is large; fails the group where there is not.
    void reserve_ring();
    // Of those that have reserved theirs.
    void map_peers();
    uint32_t done() const { return done_; }
    // Says that one step more is done.
    void post(uint32_t fingerprint);
    // Whether a slot may be written at step `step`: what it held was read by all.
    bool free_at(uint32_t step) {
        const uint32_t needed = step - slots + 3;
        return static_cast<int32_t>(slowest_ - needed) >= 0 || look_for_slowest(needed);
    }
    // Whether rank `other` has done `steps` steps, in the operation `call`. Reports calls that differ.
    bool has_come(int other, uint32_t steps, const Call &call, uint32_t begun);
    bool all_have_come(uint32_t steps, const Call &call, uint32_t begun);
    void fail(Failure kind, int other, uint64_t number);
    // `other` sends something else than this rank expects of it.
    void fail_over(const Difference &difference, int other, uint64_t number) {
        at<Difference>(layout_.differences)[rank_] = difference;
        fail(different_sizes, other, number);
    }
    // This rank cannot reach the memory of `other`, for the reason `error`, as in errno.
    void fail_to_reach(int error, int other, uint64_t number) {
        at<Difference>(layout_.differences)[rank_].error = static_cast<uint64_t>(error);
        fail(unreachable, other, number);
    }
    void finish(Task &task, State state);
    // nullptr where it cannot be; sets `error` then, as in errno.
    char *mapped(int rank, const Place &place, int &error) { return mapped_.find(pids_[rank], place, error); }

    Channel &channel(int from, int to) {
        return at<Channel>(layout_.channels)[static_cast<size_t>(from) * layout_.size + to];
    }
    char *message_slot(int from, int to, uint32_t index) {
        return at<char>(layout_.messages) + (static_cast<size_t>(from) * layout_.size + to) * layout_.channel_bytes() +
               index % message_slots * layout_.message_bytes;
    }
    bool ring_is_reserved() const { return ring_is_reserved_.load(std::memory_order_relaxed) || descriptor_ < 0; }
    void reserve_channel(int to);
    void ring(int other);

private:
    template <class T>
    T *at(size_t offset) {
        return reinterpret_cast<T *>(segment_ + offset);
    }
    std::atomic<uint64_t> &word(int rank) { return posts_[rank].word; }
    bool look_for_slowest(uint32_t needed);
    void check(const Request &request) const;
    // Notes that a call begins, of collectives in the order in which they are done.
    flight::Recorded record(const Request &request, bool watched);
    bool advance_all();
    template <class Make>
    void queue_at_once(const Make &make, const flight::Recorded &recorded, Handle &left);
    bool advance(const Handle &task);
    bool exchange_at_once(Request &request, int looks, Handle &left);
    void end_all(State state);
    void sleep(Task &task, double seconds);
    void wake(int other);
    void wake_sleepers();
    void wake_here();
    bool enough_for(int other, uint64_t awaited);
    uint64_t missing_for(const Task &task);
    bool keeps_a_peer_from_running(bool for_message);
    uint64_t missing_now();
    uint64_t everyone() const { return size() == 64 ? ~uint64_t{0} : (uint64_t{1} << size()) - 1; }
    bool work();

    char *segment_;
    Layout layout_;
    Header *header_;
    Post *posts_;
    Bell *bells_;
    const int descriptor_, rank_;
    const std::vector<int> pids_, reading_order_;
    const bool oversubscribed_, owned_;
    const size_t cache_share_;
    std::atomic<bool> closed_{false};
    std::atomic<uint32_t> recorded_as_{0};

    // Guarded by `lock_`.
    std::mutex lock_;
    uint64_t number_ = 0;  // of collectives that have begun
    uint64_t called_ = 0;  // the same, with those behind them
    uint32_t fingerprint_ = 0;
    uint32_t done_ = 0;       // steps
    uint32_t slowest_ = 0;    // steps that everybody has done, as far as seen
    uint64_t steps_ = slots;  // the same as done_, and never wraps around
    struct OwnRing {
        uint32_t begin, count, next;
    };
    // The wide ring for what is large, the near ring for small chunks, and both and the far one for what is published
    // at once.
    std::array<OwnRing, 3> rings_{{{0, pieces, 0}, {pieces, near_pieces, 0}, {pieces + near_pieces, far_pieces, 0}}};
    static size_t ring_for(uint32_t count, bool wide) { return wide ? 0 : count > most_of_near ? 2 : 1; }
    std::array<uint64_t, all_pieces> published_at_{};  // the step of each piece of the ring
    std::atomic<bool> ring_is_reserved_{false};
    bool has_mapped_peers_ = false;
    size_t parts_bytes_ = 0;                  // the most that a rank sent in the last all_to_all_v
    std::array<uint32_t, records> posted_{};  // this rank's fingerprint at each of the last steps
    std::deque<Handle> collectives_;
    struct Sends {
        std::deque<Handle> queue;
        bool reserved = false;
    };
    std::vector<Sends> sends_;  // to each rank
    Inbox inbox_;
    int under_way_ = 0;  // messages
    PeerWindows mapped_;
    Tuner tuner_;
    std::array<StreamingCopy, routes> streaming_;
    Method method_;

    // Looks in vain and yields since something was found. An oversubscribed rank gives its core away after so many
    // looks where nobody is known to need it; one that is not yields so many times for a rank that is said to be on its
    // core. Threads may lose each other's changes.
    std::atomic<uint32_t> looked_{0}, yields_{0};
    static constexpr uint32_t most_looks = 32, most_yields = 8;
    // Of each rank, the core on which it said that it was, and was not.
    std::array<std::atomic<uint32_t>, max_ranks> doubted_cores_{};

    std::mutex sleep_mutex_;
    int sleepers_ = 0;  // threads of this rank; guarded by `sleep_mutex_`

    std::atomic<int> attended_{0};  // threads that wait, and make progress
    ProgressThread worker_{[this] { return work(); }};
};

// Whether the input has a part for each rank.
constexpr bool is_cut(int operation) {
    return operation == reduce_scatter || operation == all_to_all || operation == all_to_all_v || operation == scatter;
}
constexpr bool is_reduction(int operation) {
    return operation == all_reduce || operation == reduce || operation == reduce_scatter;
}

// Makes what does the request.
Handle make_task(Group &group, Request &&request);

}  // namespace shm
