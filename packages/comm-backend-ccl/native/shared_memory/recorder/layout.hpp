// The ring file in which a rank's last calls outlive it, as comm_utils/flight_recorder/layout.py lays it out; a test
// compares both. The engine writes the second of two lanes, with a clock of its own.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace shm::flight {

constexpr char magic[] = "COMMFR01";
constexpr size_t header_bytes = 4096;
constexpr uint64_t largest_records = 1048576;
constexpr size_t lanes = 2, own_lane = 1;
// Of the lanes, in the header.
constexpr size_t clock_offset = 640, python_clock_offset = 512;

struct Header {
    char magic[8];
    uint64_t records;  // in each lane, a power of two
};

struct Clock {
    std::atomic<uint64_t> count;      // records so far
    std::atomic<uint64_t> ticks, ns;  // at one moment, of this clock and of the monotonic one
    std::atomic<double> ns_per_tick;
};

// Record n of a lane is in place n % records.
struct Record {
    std::atomic<uint64_t> number;  // 0 while the others change
    std::atomic<uint64_t> began, ended;
    std::atomic<uint64_t> kind;  // its upper half is the caller
    // In the engine's lane, the digest is 0, as the engine compares calls itself.
    std::atomic<uint64_t> elements, call, digest, root_and_tag;
};
static_assert(sizeof(Record) == 64 && std::atomic<double>::is_always_lock_free);

// Where the time of the end is: of a call that failed, and of one under way for whose end nobody waits yet.
constexpr uint64_t failed_bit = uint64_t{1} << 63, in_background = uint64_t{1} << 62, limited = uint64_t{1} << 61;

// Where the codes in a kind begin, and their bits.
constexpr int group_at = 0, group_bits = 12;
constexpr int op_at = 12, op_bits = 4;
constexpr int dtype_at = 16, dtype_bits = 6;
constexpr int operation_at = 22, operation_bits = 6;
constexpr int asynchronous_at = 28, asynchronous_bits = 1;
constexpr int native_at = 31, caller_at = 32;

constexpr uint32_t packed_kind(uint32_t operation, uint32_t dtype, uint32_t op, uint32_t group, bool asynchronous) {
    return uint32_t{1} << native_at | static_cast<uint32_t>(asynchronous) << asynchronous_at |
           operation << operation_at | dtype << dtype_at | op << op_at | group << group_at;
}

// The root, or the peer of a message, is in the lower bits, plus 1; above it the code of the user's call.
constexpr int call_at = 16, tag_at = 32;

constexpr size_t needed_bytes(uint64_t records) { return header_bytes + lanes * records * sizeof(Record); }

}  // namespace shm::flight
