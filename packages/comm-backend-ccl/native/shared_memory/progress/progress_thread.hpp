// A thread that completes operations that nobody awaits.

#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace shm {

class ProgressThread {
public:
    // `turn` does what can be done now and sleeps for a while; false where nothing is left for it.
    explicit ProgressThread(std::function<bool()> turn) : turn_(std::move(turn)) {}
    ~ProgressThread();
    ProgressThread(const ProgressThread &) = delete;

    // The first time; throws LimitError where there can be no thread.
    void start();
    // Has it look for work, where it was started.
    void notify();
    // It ends after its turn. Nothing is started afterwards.
    void stop();
    void join();

private:
    void run();

    const std::function<bool()> turn_;
    std::mutex worker_mutex_;
    std::condition_variable wake_;
    std::thread thread_;  // guarded by `worker_mutex_`, as are these
    bool stop_ = false, has_work_ = false;
};

}  // namespace shm
