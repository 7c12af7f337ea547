// The ways in which an operation on private memory can move its data. All give the same bits.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace shm {

// The codes of tables.py.
enum Transfer : uint8_t {
    cached,       // through the ring, with copies that leave the data in the caches
    streamed,     // through the ring, written around the caches
    single_copy,  // out of the peer's memory, by the kernel
    transfers,
};
extern const char *const transfer_names[transfers];

// The part of a rank's memory that its data goes round.
enum class RingSize : uint8_t {
    usual,  // as fits the size of the operation
    wide,   // of what is published at once: the one of large operations, 2 MiB
    near,   // of an operation in chunks: the smallest one, 128 KiB, in chunks of 32 KiB; half of that with more than 8
            // ranks, a quarter with more than 16
};

struct Method {
    Transfer transfer = cached;
    // Of an all_reduce or reduce in chunks: each rank that gets the result reduces everything, instead of a slice that
    // the others copy.
    bool by_all = false;
    // Of the ring: chunks that are a sixteenth of the data, instead of half of it.
    bool small_chunks = false;
    RingSize ring = RingSize::usual;

    // In the profile, so that it must not change: "cached", "cached, by all, small chunks", "cached, wide ring",
    // "cached, near ring", "cached, by all, near ring".
    std::string name() const {
        return std::string(transfer_names[transfer]) + (by_all ? ", by all" : "") +
               (small_chunks ? ", small chunks" : "") + (ring == RingSize::wide ? ", wide ring" : "") +
               (ring == RingSize::near ? ", near ring" : "");
    }
    // Not 0, which is no choice.
    uint8_t code() const {
        return static_cast<uint8_t>(1 + transfer + (by_all ? 8 : 0) + (small_chunks ? 16 : 0) +
                                    32 * static_cast<int>(ring));
    }
    // Of a call whose transfer is chosen later: where its small parts are shown.
    uint8_t place_code() const { return ring == RingSize::wide ? code() : 0; }
};

struct Methods {
    std::array<Method, 6> all{};
    int count = 0;
    void add(Method method) { all[static_cast<size_t>(count++)] = method; }
};

// Those among which an operation has a choice, the usual one first.
Methods methods_for(int operation, int ranks, int dtype, bool is_eager, bool can_read_peers);

}  // namespace shm
