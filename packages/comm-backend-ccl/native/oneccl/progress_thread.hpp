// Completes operations that were started asynchronously and that nobody awaits.
//
// oneCCL makes progress only inside calls (CCL_WORKER_OFFLOAD=0: its own worker threads cost milliseconds where ranks
// share cores).

#pragma once

#include "oneccl/request.hpp"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace oneccl {

class ProgressThread {
public:
    // There is one, which may outlive static objects.
    static ProgressThread &instance();

    // Starts the thread, unless it runs; throws, naming the limit, where none can be started.
    void start();
    // Completes the request, once the thread was started.
    void add(const Handle &request);
    void stop();
    // The thread does not exist in a forked child, and must not be joined there.
    void abandon();

private:
    void run();
    // Moves the requests that are new to the thread; false when it has to end.
    bool take_new();
    // Returns whether any was completed.
    bool test_all();

    static constexpr long shortest_ns = 20000, longest_ns = 1000000;

    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<Handle> added_;     // not seen by the thread yet
    std::vector<Handle> requests_;  // the thread's own
    std::thread thread_;
    long nap_ns_ = shortest_ns;
    bool stop_ = false;
};

}  // namespace oneccl
