// Tensors of this process that peers can map.

#pragma once

#include "segment/layout.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace shm {

// One sparse file holds the tensors of a process, so they need one descriptor, and peers map it once. Pages are
// reserved when a tensor is allocated. Freed pages are kept for tensors of any size, up to a bound; what exceeds it is
// returned to the system by punching a hole, which peers that have the file mapped see as well: none reads stale data.
class Arena {
public:
    struct Statistics {
        size_t used_bytes = 0, free_bytes = 0, retired_bytes = 0, peak_bytes = 0, bound_bytes = 0;
        size_t tensors = 0, descriptors = 0;
    };

    // `page_bytes`: of this system.
    explicit Arena(size_t page_bytes) : page_bytes_(page_bytes) {}
    Arena(const Arena &) = delete;
    static Arena &instance();
    void *allocate(size_t bytes);
    void free(void *begin);
    // Where peers find [begin, begin + bytes); none unless all of it is in one tensor's memory, which is not retired.
    Place find(const void *begin, size_t bytes);
    // Never again uses the memory of the tensor around `begin` for another one: a peer may yet write to the first
    // `written` bytes from there. Private pages take the place of theirs, so that the tensor does not change. A page
    // that has other bytes of the tensor stays, as another operation may be using those. Nobody frees the tensor
    // meanwhile.
    void retire(const void *begin, size_t written);
    // Returns to the system what no tensor uses.
    void trim();
    Statistics statistics();
    // Around a fork, so that no thread that the child lacks holds the mutex there.
    void lock() { mutex_.lock(); }
    void unlock() { mutex_.unlock(); }

    // Pages that are kept at least.
    static constexpr size_t least_kept_bytes = size_t{64} << 20;
    // More is kept while as much was in use within so many allocations: a training step frees and allocates the same.
    static constexpr size_t remembered_allocations = 256;

private:
    // `reserving`: of a tensor that is being allocated, without the mutex.
    enum State : uint8_t { hole, kept, reserving, used, retired };
    struct Extent {
        size_t bytes;
        State state;
        size_t asked = 0;  // of `bytes`, what the tensor has
    };
    using Extents = std::map<size_t, Extent>;  // by offset; they cover the region without gaps
    struct Region {
        char *begin;
        size_t bytes;
        int descriptor;
        uint64_t inode;
        Extents extents;
        std::set<size_t> free_extents;  // where holes and kept ones begin: tensors in use may be many
    };
    struct Run {
        size_t offset, bytes;
    };
    struct Found {
        Region *region = nullptr;
        size_t offset = 0, missing = 0, run = 0;
    };

    Found best_run(size_t bytes);
    Region &add_region(size_t bytes);
    Region *region_of(const void *begin);
    static std::vector<Run> holes_in(const Region &region, size_t offset, size_t bytes);
    void set(Region &region, size_t offset, size_t bytes, State state);
    static Extents::iterator merge(Region &region, Extents::iterator at);
    static bool is_free(State state) { return state == hole || state == kept; }
    void return_beyond(size_t bound);
    size_t bound() const;
    void remember();
    // No two tensors have a part of one page: that of a tensor can be replaced or given up by itself.
    size_t whole_pages(size_t bytes) const { return (bytes + page_bytes_ - 1) / page_bytes_ * page_bytes_; }

    const size_t page_bytes_;
    std::mutex mutex_;
    std::deque<Region> regions_;
    size_t used_bytes_ = 0, kept_bytes_ = 0, retired_bytes_ = 0, tensors_ = 0, peak_bytes_ = 0;
    // The most in use in the current period of allocations and in the one before it.
    size_t most_now_ = 0, most_before_ = 0, allocations_ = 0;
};

}  // namespace shm
