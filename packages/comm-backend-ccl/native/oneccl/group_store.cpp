#include "oneccl/group_store.hpp"

#include "oneccl/library.hpp"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

namespace oneccl {

namespace {

std::atomic<int> next_id{1};

// Under such keys, each rank writes its host name and pid, and oneCCL takes ranks with equal values for one process.
// Ranks in containers share both: a host's name, and pid 1.
bool names_process(const ccl::string_class &key) {
    static constexpr char prefix[] = "PROCESS_THREAD_NAME";
    return std::strncmp(key.c_str(), prefix, sizeof prefix - 1) == 0;
}

void pause(long nanoseconds) {
    const timespec nap{0, nanoseconds};
    nanosleep(&nap, nullptr);
}

}  // namespace

GroupStore::GroupStore(Get get, Set set, void *context) : get_(get), set_(set), context_(context), id_(next_id++) {}

ccl::vector_class<char> GroupStore::get(const ccl::string_class &key) {
    ccl::vector_class<char> value(16384);
    // oneCCL counts the uses of a store under this name, and takes "nothing" for none; every other key it awaits.
    const bool optional = std::strncmp(key.c_str(), "LOCAL_KVS_ID", 12) == 0;
    const LibraryRelease while_waiting;
    // oneCCL awaits others by asking for the same key again and again.
    if (last_key_ == key.c_str()) {
        pause(200000);
    }
    last_key_ = key.c_str();
    for (long nap_ns = 100000;; nap_ns = std::min(nap_ns * 2, 5000000L)) {
        const int size = get_(context_, key.c_str(), value.data(), static_cast<int>(value.size()));
        if (size < 0) {
            closed_ = true;
            throw std::runtime_error("the other ranks did not come");
        }
        if (size > 0 || optional) {
            value.resize(static_cast<size_t>(size));
            if (names_process(key) && own_name_ != key.c_str()) {
                // A name that no other rank has: a pid ends in no slash, and another rank has another key.
                const std::string name = std::string(key.c_str()) + '/';
                value.assign(name.c_str(), name.c_str() + name.size() + 1);
            }
            return value;
        }
        pause(nap_ns);
    }
}

void GroupStore::set(const ccl::string_class &key, const ccl::vector_class<char> &value) {
    if (closed_) {
        return;
    }
    if (names_process(key)) {
        own_name_ = key.c_str();
    }
    const LibraryRelease while_writing;
    if (set_(context_, key.c_str(), value.data(), static_cast<int>(value.size())) < 0) {
        closed_ = true;
        throw std::runtime_error("the store could not be written");
    }
}

}  // namespace oneccl
