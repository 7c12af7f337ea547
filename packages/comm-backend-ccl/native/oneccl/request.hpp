// An operation under way.

#pragma once

#include <oneapi/ccl.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace oneccl {

enum State { pending = 0, complete = 1, failed = 2 };

using Communicator = std::shared_ptr<ccl::communicator>;

struct Request {
    Communicator on;  // oneCCL uses it until the end of the operation
    ccl::event event;
    std::atomic<int> state{pending};
    int64_t ended_ns = 0;  // by the steady clock, when `state` was first seen to be complete
    std::string error;
    std::atomic<std::chrono::steady_clock::duration> awaited_since{};  // by the steady clock; 0 before the first wait

    Request() = default;
    ~Request();
    Request(const Request &) = delete;
    Request &operator=(const Request &) = delete;

    // Makes progress with every operation of this process.
    int test();
    // The same for callers that hold the library.
    int test_locked();

private:
    // The destructor of an event that is not complete throws, where it must not.
    void leak();
};

using Handle = std::shared_ptr<Request>;

int wait_for(Request &request, double seconds);

}  // namespace oneccl
