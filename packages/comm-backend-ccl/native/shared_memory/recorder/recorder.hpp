// Writes this process's calls into its ring file: one record a call, begun with its beginning, and its end at the end.

#pragma once

#include "recorder/clock.hpp"
#include "recorder/layout.hpp"

#include <atomic>
#include <cstdint>

namespace shm::flight {

// What is known of a call when it begins.
struct Facts {
    uint32_t kind;
    uint64_t elements;
    uint64_t call;  // of the group's collectives; 0 of a message
    int root;       // or the peer of a message; -1 is none
    int tag;
    bool in_background;  // nobody waits for its end
    uint16_t user_call;  // the code of the user's call; 0 is the operation
};

// The record of one call; of none where nothing was recorded when it began.
class Recorded {
public:
    Recorded() = default;
    Recorded(Record *record, uint64_t number) : record_(record), number_(number) {}

    // In its lane, from 1; 0 is none.
    uint64_t number() const { return number_; }
    // Somebody begins to wait for its end, in this place of a program; 0 is unknown. The first place stays.
    // `is_limited`: for a time that is not the group's.
    void wait(uint32_t caller, bool is_limited) const {
        if (is_kept()) {
            uint64_t before = in_background;
            const uint64_t now = is_limited ? limited : 0;
            if (!record_->ended.compare_exchange_strong(before, now, std::memory_order_relaxed) && before == 0) {
                record_->ended.compare_exchange_strong(before, now, std::memory_order_relaxed);
            }
            uint64_t kind = static_cast<uint32_t>(record_->kind.load(std::memory_order_relaxed));
            record_->kind.compare_exchange_strong(kind, kind | static_cast<uint64_t>(caller) << caller_at,
                                                  std::memory_order_relaxed);
        }
    }
    void end(bool failed) const {
        if (is_kept()) {
            record_->ended.store(ticks() | (failed ? failed_bit : 0), std::memory_order_relaxed);
        }
    }

private:
    // Many calls later, the place is another's.
    bool is_kept() const { return record_ != nullptr && record_->number.load(std::memory_order_relaxed) == number_; }

    Record *record_ = nullptr;
    uint64_t number_ = 0;
};

// The lane of a ring file. Its addresses stay valid for good, as calls may end after recording has.
class Lane {
public:
    // Maps the file. Throws std::invalid_argument for what is no ring, SharedMemoryError where memory lacks.
    explicit Lane(int descriptor);
    Lane(const Lane &) = delete;

    Recorded begin(const Facts &facts) {
        const uint64_t number = clock_->count.fetch_add(1, std::memory_order_relaxed) + 1;
        Record &record = records_[number & mask_];
        record.number.store(0, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_release);
        constexpr auto relaxed = std::memory_order_relaxed;
        record.began.store(ticks(), relaxed);
        record.ended.store(facts.in_background ? in_background : 0, relaxed);
        record.kind.store(facts.kind, relaxed);
        record.elements.store(facts.elements, relaxed);
        record.call.store(facts.call, relaxed);
        record.digest.store(0, relaxed);
        record.root_and_tag.store(static_cast<uint16_t>(facts.root + 1) |
                                      static_cast<uint64_t>(facts.user_call) << call_at |
                                      static_cast<uint64_t>(facts.tag) << tag_at,
                                  relaxed);
        record.number.store(number, std::memory_order_release);
        // Its line is in no cache any more, and the next call's first full fence would wait for it.
        __builtin_prefetch(&records_[(number + 1) & mask_], 1);
        if (number % calls_between_readings == 0) {
            refine_clock();
        }
        return {&record, number};
    }
    // Measures the rate of the counter again, where the last time is a while ago.
    void refine_clock();
    // Gives the file back. Who still writes, writes to nobody.
    void leave();

private:
    static constexpr uint64_t calls_between_readings = 4096;

    void *begin_ = nullptr;
    size_t bytes_ = 0;
    Clock *clock_ = nullptr;
    Record *records_ = nullptr;
    uint64_t mask_ = 0;
    Moment opened_{};
    std::atomic<uint64_t> read_at_{0};  // ticks
};

// Where this process records; nullptr where it does not.
extern std::atomic<Lane *> current;

// From now on in the ring of this descriptor, which may be closed afterwards; -1 ends it. Throws as Lane does, and goes
// on as before then. Forked children record nothing until they call it themselves.
void record_to(int descriptor);

inline Recorded begin(const Facts &facts) {
    Lane *lane = current.load(std::memory_order_acquire);
    return lane == nullptr ? Recorded() : lane->begin(facts);
}

// Where there is time for it.
inline void refine_clock() {
    if (Lane *lane = current.load(std::memory_order_acquire)) {
        lane->refine_clock();
    }
}

}  // namespace shm::flight
