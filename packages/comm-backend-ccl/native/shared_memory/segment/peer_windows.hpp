// What peers hold, mapped here.

#pragma once

#include "segment/layout.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

namespace shm {

class PeerWindows {
public:
    PeerWindows() = default;
    ~PeerWindows();
    PeerWindows(const PeerWindows &) = delete;
    // nullptr where it cannot be mapped; sets `error` then, as in errno. The first use of a peer's file maps all of it,
    // until the group ends.
    char *find(int pid, const Place &place, int &error) noexcept;

private:
    struct Window {
        void *begin;
        size_t bytes;
    };
    std::map<std::pair<int, uint64_t>, Window> windows_;
};

}  // namespace shm
