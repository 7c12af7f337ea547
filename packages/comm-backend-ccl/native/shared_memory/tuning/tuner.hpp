// Chooses how a group's operations move their data, from the durations of its own calls.
//
// All ranks must choose alike, and no message may be sent for it. Every rank writes how long its calls took to where
// the others read it, before its next step. When a rank begins a call more than `slots` steps after another ended, all
// ranks have written how long that took, as none is more than `slots` steps ahead. Steps are the same everywhere. So
// each learns from the durations of that call on all ranks, which are the same numbers, in the same order, and comes to
// the same choice.

#pragma once

#include "segment/layout.hpp"
#include "tuning/learner.hpp"
#include "tuning/method.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace shm {

struct Request;

// How a group moves data; all its ranks have the same.
struct Settings {
    uint32_t code() const { return static_cast<uint32_t>(transfer + 1) << 1 | (learns ? 1 : 0); }
    int transfer = -1;  // always this one, where it is possible; -1 is any
    bool learns = true;
};

class Tuner {
public:
    Tuner(int size, int rank, const std::vector<int> &pids, Identity *identities, CallTimes *call_times,
          size_t wide_ring_bytes, Settings settings);

    // How the operation that begins now, when the group has done `steps`, moves `bytes` of each rank.
    Method begin(const Request &request, size_t bytes, bool is_eager, uint64_t steps);
    // It moved them otherwise, so that its duration says nothing.
    void ignore() { timed_ = false; }
    // From now on always this transfer, and this ring, where it is possible; on all ranks alike.
    void fix(Transfer transfer, RingSize ring = RingSize::usual);
    // How long an operation took with a method on another group of as many ranks.
    struct Prior {
        int operation;
        size_t least_bytes;
        bool narrow, is_eager;
        std::string method;
        uint64_t ns;
    };
    // What to begin with, instead of what it has learned; on all ranks alike, between two operations.
    void start_from(std::vector<Prior> priors);
    // It is complete, and the group has done `steps`.
    void end(uint64_t steps);
    struct Known {
        int operation;
        size_t least_bytes;
        bool narrow, is_eager;
        Method best;
        bool has_settled;
        uint32_t changes;
        std::vector<std::pair<Method, uint64_t>> typical_ns;
    };
    // What it has learned.
    std::vector<Known> known() const;
    // Of small operations and messages, which have no choice of their own: what is clearly better for larger ones.
    Method usual_of_small() const { return {streams_small_ ? streamed : cached, false, false, ring_of_small_}; }
    bool can_read_peers() const { return can_read_; }
    // Whether all ranks have begun a call that had a choice, so that they have reserved what such calls need.
    bool has_met_all() const { return has_probed_all_; }
    // Whether the kernel lets this rank read the memory of all others, which have joined.
    bool reads_peers() const;
    // Room for what was read of one peer and is reduced next.
    char *scratch(int peer) const { return scratch_.get() + static_cast<size_t>(peer) * scratch_bytes; }

    static constexpr size_t scratch_bytes = 64 << 10;

    // How many calls one of `bytes` counts as: programs make few of the largest, and the cores move meanwhile.
    static constexpr size_t segments_of(size_t bytes) { return bytes < 2 * long_bytes ? 1 : bytes / long_bytes; }

private:
    static constexpr size_t long_bytes = size_t{4} << 20;
    static constexpr uint64_t lag = slots;

    struct Tried {
        Learner *learner = nullptr;
        Learner::Choice choice;
        Method method;
        uint8_t operation = 0;
        int root = -1;
        bool small = false;
        uint32_t calls = 1;
        uint64_t ended_at = UINT64_MAX;  // steps
    };
    // Operations of one kind and size.
    struct Class {
        Class(const Methods &methods, bool are_long, const Learner::Nanoseconds &known_ns,
              const Learner::Calls &warm_up);
        const Methods methods;
        Learner learner;
        // The first way round the wide ring finds it in other caches than those after it, so calls go round it before
        // a comparison, with this candidate.
        int warmed_up = -1;
        uint32_t warm_up = 0, warm_up_left = 0, comparisons = 0;
        uint32_t unseen = 0;   // calls since the last one from which it learns
        uint32_t upsets = 0;   // of all classes, when this one looked what they mean to it
        int64_t ended_ns = 0;  // of that one
    };
    static constexpr size_t size_classes = 48;

    // One in so many calls is learned from, in the long run: the clock and the others' times cost 0.1 to 0.5 us.
    static uint32_t seen_one_in(size_t bytes) {
        return bytes <= (size_t{32} << 10)    ? 32
               : bytes <= (size_t{128} << 10) ? 16
               : bytes <= (size_t{512} << 10) ? 8
               : bytes <= (size_t{4} << 20)   ? 4
                                              : 1;
    }
    Class &class_of(const Request &request, size_t bytes, bool is_eager);
    size_t shown_bytes(const Request &request, size_t bytes) const;
    Learner::Nanoseconds known_for(const Methods &methods, const Known &kind);
    Learner::Nanoseconds known_of_segments(const Methods &methods, const Known &kind);
    std::unique_ptr<Class> &class_at(int operation, size_t size_class, bool narrow, bool is_eager);
    Method follow(Class &of, const Request &request, size_t bytes, bool is_eager, uint64_t steps);

    Tried &begin_call(uint64_t steps);
    void probe();
    void learn(uint64_t call);
    uint64_t duration(const Tried &tried, uint64_t call) const;
    uint64_t duration(int rank, uint64_t call) const;

    const int size_, rank_;
    Settings settings_;
    const std::vector<int> &pids_;
    Identity *const identities_;
    CallTimes *const call_times_;
    const uint64_t mark_;   // what peers must find at its address
    uint64_t calls_ = 0;    // from which it learns
    uint64_t learned_ = 0;  // of those
    uint32_t upsets_ = 0;   // of all classes
    // The step at which this rank tried to read the others' memory, as all did.
    uint64_t probed_at_ = 0;
    // Whether all ranks know how that went for all.
    bool has_probed_all_ = false;
    int64_t begun_ns_ = 0;
    Class *timed_class_ = nullptr;
    bool active_ = false, timed_ = false;
    bool can_read_ = false, streams_small_ = false;
    RingSize ring_of_small_ = RingSize::usual, fixed_ring_ = RingSize::usual;
    const size_t wide_ring_bytes_;
    std::array<Tried, CallTimes::kept> tried_{};
    std::vector<Prior> priors_;
    std::vector<std::unique_ptr<Class>> classes_;  // by operation, size, dtype and whether it is eager
    std::unique_ptr<char[]> scratch_;
};

}  // namespace shm
