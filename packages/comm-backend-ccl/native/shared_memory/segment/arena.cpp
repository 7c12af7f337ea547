#include "segment/arena.hpp"

#include "segment/memory.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <iterator>
#include <limits>

namespace shm {

namespace {

constexpr const char *what = "a tensor in shared memory";
// Address space, not memory: a file is sparse. Peers map all of it.
constexpr size_t most_region_bytes = size_t{4} << 30;
// Of the address space, where it is limited: peers have regions as well, which this process maps.
constexpr rlim_t region_share = 32;

size_t region_bytes() {
    rlimit limit{};
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
        return most_region_bytes;
    }
    return static_cast<size_t>(std::min<rlim_t>(most_region_bytes, limit.rlim_cur / region_share));
}

}  // namespace

Arena &Arena::instance() {
    static Arena &arena = *new Arena(page_bytes());  // tensors may outlive static objects
    return arena;
}

void *Arena::allocate(size_t bytes) {
    if (bytes > std::numeric_limits<size_t>::max() / 4) {
        throw SharedMemoryError(std::string(what) + " needs " + mebibytes(bytes) +
                                " of shared memory, more than any process can address");
    }
    const size_t asked = bytes;
    bytes = whole_pages(bytes == 0 ? 1 : bytes);
    std::unique_lock<std::mutex> alone(mutex_);
    Found found = best_run(bytes);
    if (found.region == nullptr || found.missing > 0) {
        // Before anything is reserved: the system would end a process instead of refusing it memory.
        const size_t missing = found.region == nullptr ? bytes : found.missing;
        try {
            check_memory(missing, what);
        } catch (const SharedMemoryError &) {
            return_beyond(0);
            check_memory(bytes, what);
            found = best_run(bytes);
        }
    }
    if (found.region == nullptr) {
        found = Found{&add_region(bytes), 0, bytes, bytes};
    }
    Region &region = *found.region;
    if (found.missing > 0) {
        const std::vector<Run> holes = holes_in(region, found.offset, bytes);
        set(region, found.offset, bytes, reserving);
        // It takes seconds where there is much, and others need the mutex, some with the interpreter's lock.
        alone.unlock();
        try {
            for (const Run &one : holes) {
                reserve_memory(region.descriptor, one.offset, one.bytes, what);
            }
        } catch (...) {
            return_memory(region.descriptor, found.offset, bytes);
            alone.lock();
            set(region, found.offset, bytes, hole);
            throw;
        }
        alone.lock();
    }
    set(region, found.offset, bytes, used);
    region.extents[found.offset].asked = asked;
    ++tensors_;
    remember();
    return region.begin + found.offset;
}

void Arena::free(void *begin) {
    const std::lock_guard<std::mutex> alone(mutex_);
    Region *region = region_of(begin);
    if (region == nullptr) {
        return;
    }
    const size_t offset = static_cast<size_t>(static_cast<char *>(begin) - region->begin);
    const auto found = region->extents.find(offset);
    if (found == region->extents.end() || (found->second.state != used && found->second.state != retired)) {
        return;
    }
    --tensors_;
    if (found->second.state == retired) {
        return_memory(region->descriptor, offset, found->second.bytes);  // its place stays taken
        drop_pages(begin, found->second.bytes);
        retired_bytes_ -= found->second.bytes;
        return;
    }
    set(*region, offset, found->second.bytes, kept);
    return_beyond(bound());
}

Place Arena::find(const void *begin, size_t bytes) {
    const std::lock_guard<std::mutex> alone(mutex_);
    Region *region = region_of(begin);
    if (region == nullptr) {
        return {};
    }
    const size_t offset = static_cast<size_t>(static_cast<const char *>(begin) - region->begin);
    const auto next = std::prev(region->extents.upper_bound(offset));
    // Tensors of a program may lie side by side, but a request is part of one.
    if (next->second.state != used || bytes > next->first + next->second.bytes - offset) {
        return {};
    }
    return Place{region->inode, offset, region->descriptor};
}

void Arena::retire(const void *begin, size_t written) {
    const auto *first = static_cast<const char *>(begin);
    size_t end = written;
    int descriptor;
    char *file;
    {
        const std::lock_guard<std::mutex> alone(mutex_);
        Region *region = region_of(begin);
        if (region == nullptr) {
            return;
        }
        descriptor = region->descriptor;
        file = region->begin;
        const auto offset = static_cast<size_t>(first - file);
        const auto around = std::prev(region->extents.upper_bound(offset));
        Extent &extent = around->second;
        if (extent.state == used) {
            extent.state = retired;
            used_bytes_ -= extent.bytes;
            retired_bytes_ += extent.bytes;
        }
        if (offset + written == around->first + extent.asked) {
            end = around->first + extent.bytes - offset;  // nothing else is behind it
        }
    }
    if (written > 0) {
        // Without the mutex: it takes as long as a copy.
        make_private(const_cast<char *>(first), end, descriptor, file);
    }
}

void Arena::trim() {
    const std::lock_guard<std::mutex> alone(mutex_);
    return_beyond(0);
}

Arena::Statistics Arena::statistics() {
    const std::lock_guard<std::mutex> alone(mutex_);
    Statistics found;
    found.used_bytes = used_bytes_;
    found.free_bytes = kept_bytes_;
    found.retired_bytes = retired_bytes_;
    found.peak_bytes = peak_bytes_;
    found.bound_bytes = bound();
    found.tensors = tensors_;
    found.descriptors = regions_.size();
    return found;
}

// The run of free extents that needs the least new memory, and of those the shortest.
Arena::Found Arena::best_run(size_t bytes) {
    Found best;
    for (Region &region : regions_) {
        auto one = region.free_extents.begin();
        while (one != region.free_extents.end()) {
            Found run{&region, *one, 0, 0};
            for (; one != region.free_extents.end() && *one == run.offset + run.run; ++one) {
                const Extent &extent = region.extents.find(*one)->second;
                if (extent.state == hole && run.run < bytes) {
                    run.missing += std::min(extent.bytes, bytes - run.run);
                }
                run.run += extent.bytes;
            }
            if (run.run >= bytes && (best.region == nullptr || run.missing < best.missing ||
                                     (run.missing == best.missing && run.run < best.run))) {
                best = run;
            }
        }
    }
    return best;
}

Arena::Region &Arena::add_region(size_t bytes) {
    // Limits of file size or address space may leave room for less.
    for (size_t size = std::max(bytes, whole_pages(region_bytes()));; size = std::max(bytes, whole_pages(size / 4))) {
        int descriptor = -1;
        try {
            descriptor = create_memory(size);
            auto *begin = static_cast<char *>(map_memory(descriptor, size));
            regions_.push_back(Region{begin, size, descriptor, inode_of(descriptor), {}, {}});
            regions_.back().extents[0] = Extent{size, hole};
            regions_.back().free_extents.insert(0);
            return regions_.back();
        } catch (const LimitError &) {
            throw;
        } catch (const SharedMemoryError &) {
            if (descriptor >= 0) {
                close_memory(descriptor);
            }
            if (size == bytes) {
                throw;
            }
        }
    }
}

Arena::Region *Arena::region_of(const void *begin) {
    const auto *at = static_cast<const char *>(begin);
    for (Region &region : regions_) {
        if (at >= region.begin && at < region.begin + region.bytes) {
            return &region;
        }
    }
    return nullptr;
}

// Of [offset, offset + bytes), where an extent begins.
std::vector<Arena::Run> Arena::holes_in(const Region &region, size_t offset, size_t bytes) {
    std::vector<Run> holes;
    const size_t end = offset + bytes;
    for (auto one = region.extents.find(offset); one != region.extents.end() && one->first < end; ++one) {
        if (one->second.state == hole) {
            holes.push_back({one->first, std::min(one->second.bytes, end - one->first)});
        }
    }
    return holes;
}

// Gives [offset, offset + bytes) a state; where it begins, an extent does.
void Arena::set(Region &region, size_t offset, size_t bytes, State state) {
    const auto count = [this](State of, size_t much, bool add) {
        size_t *total = of == used      ? &used_bytes_
                        : of == kept    ? &kept_bytes_
                        : of == retired ? &retired_bytes_
                                        : nullptr;
        if (total != nullptr) {
            *total += add ? much : -much;
        }
    };
    const size_t end = offset + bytes;
    auto one = region.extents.find(offset);
    while (one != region.extents.end() && one->first < end) {
        const size_t begin = one->first, until = begin + one->second.bytes;
        const State before = one->second.state;
        count(before, std::min(until, end) - begin, false);
        one = region.extents.erase(one);
        region.free_extents.erase(begin);
        if (until > end) {
            region.extents.emplace_hint(one, end, Extent{until - end, before});
            if (is_free(before)) {
                region.free_extents.insert(end);
            }
        }
    }
    count(state, bytes, true);
    if (is_free(state)) {
        region.free_extents.insert(offset);
    }
    merge(region, region.extents.emplace(offset, Extent{bytes, state}).first);
    peak_bytes_ = std::max(peak_bytes_, used_bytes_);
}

// Joins free neighbours of one state.
Arena::Extents::iterator Arena::merge(Region &region, Extents::iterator at) {
    if (!is_free(at->second.state)) {
        return at;
    }
    Extents &extents = region.extents;
    const auto next = std::next(at);
    if (next != extents.end() && next->second.state == at->second.state) {
        at->second.bytes += next->second.bytes;
        region.free_extents.erase(next->first);
        extents.erase(next);
    }
    if (at != extents.begin()) {
        const auto before = std::prev(at);
        if (before->second.state == at->second.state) {
            before->second.bytes += at->second.bytes;
            region.free_extents.erase(at->first);
            extents.erase(at);
            return before;
        }
    }
    return at;
}

// From the end: tensors are placed as far to the front as they fit.
void Arena::return_beyond(size_t bound) {
    for (auto region = regions_.rbegin(); region != regions_.rend() && kept_bytes_ > bound; ++region) {
        auto next = region->free_extents.end();
        while (next != region->free_extents.begin() && kept_bytes_ > bound) {
            --next;
            auto one = region->extents.find(*next);
            if (one->second.state != kept) {
                continue;
            }
            const size_t much = std::min(one->second.bytes, whole_pages(kept_bytes_ - bound));
            const size_t offset = one->first + one->second.bytes - much;
            return_memory(region->descriptor, offset, much);
            if (much < one->second.bytes) {
                one->second.bytes -= much;
                one = region->extents.emplace(offset, Extent{much, kept}).first;
                region->free_extents.insert(offset);
            }
            kept_bytes_ -= much;
            one->second.state = hole;
            next = region->free_extents.find(merge(*region, one)->first);
        }
    }
}

size_t Arena::bound() const { return std::max({least_kept_bytes, most_now_, most_before_}); }

void Arena::remember() {
    if (++allocations_ % remembered_allocations == 0) {
        most_before_ = most_now_;
        most_now_ = 0;
    }
    most_now_ = std::max(most_now_, used_bytes_);
}

}  // namespace shm
