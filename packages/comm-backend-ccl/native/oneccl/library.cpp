#include "oneccl/library.hpp"

#include <stdexcept>

namespace oneccl {

std::timed_mutex library;
std::atomic<int> waiting{0};
std::atomic<int> under_way{0};
std::atomic<bool> forked{false};
std::atomic<bool> ranks_share_cores{false};
bool stopped = false;
std::atomic<bool> unfinished{false};

LibraryLock::LibraryLock() {
    if (!library.try_lock() && !library.try_lock_for(std::chrono::seconds(5))) {
        throw std::runtime_error("oneCCL is held up by a group that could not be made; start the process anew");
    }
}

}  // namespace oneccl
