// What the ranks of a group share: one segment of memory, laid out here.
//
// The flag protocol. A rank does the steps of its operations one after the other and posts after each how many it has
// done since the group began, with a fingerprint of the operation: one word, which it alone writes. A rank starts a
// step when the words of others say that what it reads is there, and that what it overwrites was read. `model/` checks
// all interleavings of posting, sleeping and waking.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace shm {

// Changes with whatever ranks of two builds would understand differently: this file, methods and their learner.
constexpr int layout_number = 2;
constexpr int max_ranks = 64;
constexpr size_t line = 128;  // two cache lines: processors fetch them in pairs
// Steps that a rank may be ahead of another, and slots for what is small; there are more records than that.
constexpr uint32_t slots = 8;
constexpr uint32_t records = 16;
constexpr size_t slot_bytes = 8 << 10;
// Pieces of the ring for what is larger. All of it is more than a core's own cache holds: lines that have left the
// other core's cache are written, and read by it, several times as fast as those that both still have.
constexpr uint32_t pieces = 512;
// An operation in chunks takes so many of them at a time, or some times as many where all of it fits into the ring.
constexpr uint32_t pieces_of_chunk = 32, larger_chunk = 4;
static_assert(pieces / (larger_chunk * pieces_of_chunk) >= 3, "a chunk is free again three steps after it was shown");
// What is published at once has rings of its own behind that one, for up to so many pieces: what a program does between
// two calls puts fewer of their lines out of the caches. Calls back to back are faster in the large one, so that is a
// choice by measurement. The smallest, the near ring, also serves operations in small chunks. The pieces of an
// operation are free again three operations later; each has its place in one of at least four blocks of the largest
// size, and goes forward by one at most.
constexpr uint32_t most_of_near = 8, most_of_far = pieces_of_chunk;
constexpr uint32_t near_pieces = 4 * most_of_near, far_pieces = 8 * most_of_far;
static_assert(near_pieces / most_of_near >= 4, "a chunk in the near ring is free again three steps after it was shown");
constexpr uint32_t all_pieces = pieces + near_pieces + far_pieces;
constexpr uint32_t message_slots = 4;

// What a rank called; written before the first word of the operation.
struct Call {
    uint64_t number = 0;  // of operations in this group, from 1
    uint64_t count = 0;   // of elements
    uint32_t fingerprint = 0;
    int32_t root = -1;
    uint8_t operation = 0, dtype = 0, op = 0;
    uint8_t method = 0;  // the code of how it moves data, where that was chosen before it began
    // The codes of its last segments, each written before the step that comes before the segment is posted. A rank is
    // less than four segments ahead of another, as each has at least two steps.
    uint8_t of_segments[4] = {};
};

// What the program passed to the call of that number, where it is something else than what the engine got.
struct Shown {
    uint64_t number = 0;
    char text[40] = "";
};

// Memory of a rank that others can map; inode 0 is none.
struct Place {
    uint64_t inode = 0, offset = 0;
    int32_t descriptor = -1;
};

struct alignas(line) Record {
    Call call;
    Place input;
    uint64_t input_address = 0, output_address = 0;  // in its rank's process
    uint64_t largest = 0;                            // bytes that it sends to one rank, where that differs
    Shown passed;
};
static_assert(sizeof(Record) == line);

// By which peers know that they read this rank's memory and nobody else's, and whether this rank can read all of
// theirs.
struct alignas(line) Identity {
    uint64_t mark = 0, address = 0;
    uint32_t settings = 0;
    std::atomic<uint32_t> reads{0};
    static constexpr uint32_t can_read = 1, cannot_read = 2;
};

// How long a rank's last calls took that have a choice of methods; 0 is unknown.
struct alignas(line) CallTimes {
    // Nobody is more than `slots` steps ahead of another, or as much behind.
    static constexpr uint64_t kept = 4 * slots;
    std::array<std::atomic<uint64_t>, kept> ns{};
    // Of the first rank: from the end of the call of the same kind before it to its beginning.
    std::array<std::atomic<uint64_t>, kept> elapsed_ns{};
};

// Written by its rank alone.
struct alignas(line) Post {
    std::atomic<uint64_t> word{0};  // fingerprint << 32 | steps done
    std::atomic<uint32_t> core{0};  // on which it waited last, from 1; 0 is unknown
};
struct alignas(line) Bell {
    std::atomic<uint32_t> rings{0};  // a futex; written by all
    // While the rank sleeps: 0 to be woken by anything, else needs_all | the steps that all must have done.
    std::atomic<uint64_t> awaited{0};
};
constexpr uint64_t needs_all = uint64_t{1} << 63;

// Of messages from one rank to another, in slots' worth.
struct Channel {
    alignas(line) std::atomic<uint32_t> sent{0};
    alignas(line) std::atomic<uint32_t> received{0};
};
// At the head of a message.
struct Announcement {
    uint64_t bytes;
    uint32_t dtype;
    int32_t tag;
};
// What a rank found another to send, and expected of it, for whom it waited, or why it cannot reach another's memory;
// written before it says so.
struct alignas(line) Difference {
    uint64_t sent_bytes, expected_bytes;
    uint64_t sent_dtype, expected_dtype;
    uint64_t missing = 0;  // the ranks, as bits, for which it waited in vain
    uint64_t error = 0;    // why it cannot reach the memory of another, as in errno
};

struct alignas(line) Header {
    alignas(line) std::atomic<uint64_t> sleeping{0};  // a bit for each rank
    // 0, or failed_mark | kind << 60 | who found it << 54 | the other rank << 48 | the number of the operation
    alignas(line) std::atomic<uint64_t> failure{0};
    // Whether ranks share hardware threads, as the first rank found: by this, all cut alike. Each waits by what it
    // finds.
    std::atomic<uint32_t> oversubscribed{0};
};
enum Failure : uint32_t {
    different_calls = 1,
    different_sizes = 2,
    unreachable = 3,
    no_memory = 4,
    gave_up = 5,
    timed_out = 6,
    unmatched = 7
};
constexpr uint64_t failed_mark = uint64_t{1} << 63;

// Offsets and sizes in bytes.
struct Layout {
    int size;
    size_t piece_bytes, message_bytes;
    size_t posts, bells, differences, identities, call_times, records_at, sizes, slots_at, rings, channels, messages,
        end;

    explicit Layout(int ranks) : size(ranks) {
        const size_t n = static_cast<size_t>(ranks);
        piece_bytes = ranks <= 8 ? 4 << 10 : ranks <= 16 ? 2 << 10 : 1 << 10;
        message_bytes = ranks <= 8 ? 64 << 10 : 16 << 10;
        size_t at = sizeof(Header);
        const auto take = [&at](size_t bytes) {
            const size_t begin = at;
            at += (bytes + line - 1) / line * line;
            return begin;
        };
        posts = take(n * sizeof(Post));
        bells = take(n * sizeof(Bell));
        differences = take(n * sizeof(Difference));
        identities = take(n * sizeof(Identity));
        call_times = take(n * sizeof(CallTimes));
        records_at = take(n * records * sizeof(Record));
        sizes = take(records * n * n * sizeof(uint64_t));
        channels = take(n * n * sizeof(Channel));
        at = page(at);
        slots_at = take(n * slots * slot_bytes);
        at = page(at);
        rings = take(n * all_ring_bytes());
        at = page(at);
        messages = take(n * n * message_slots * message_bytes);
        end = page(at);
    }

    static size_t page(size_t bytes) { return (bytes + 4095) & ~size_t{4095}; }
    size_t ring_bytes() const { return pieces * piece_bytes; }
    size_t all_ring_bytes() const { return all_pieces * piece_bytes; }
    size_t chunk_bytes() const { return pieces_of_chunk * piece_bytes; }
    size_t channel_bytes() const { return message_slots * message_bytes; }
};

}  // namespace shm
