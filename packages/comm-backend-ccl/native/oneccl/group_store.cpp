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
            return value;
        }
        pause(nap_ns);
    }
}

void GroupStore::set(const ccl::string_class &key, const ccl::vector_class<char> &value) {
    if (closed_) {
        return;
    }
    const LibraryRelease while_writing;
    if (set_(context_, key.c_str(), value.data(), static_cast<int>(value.size())) < 0) {
        closed_ = true;
        throw std::runtime_error("the store could not be written");
    }
}

}  // namespace oneccl
