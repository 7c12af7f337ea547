#include "oneccl/progress_thread.hpp"

#include "oneccl/library.hpp"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace oneccl {

ProgressThread &ProgressThread::instance() {
    static ProgressThread &one = *new ProgressThread;
    return one;
}

void ProgressThread::start() {
    const std::lock_guard<std::mutex> held(mutex_);
    if (stop_ || thread_.joinable()) {
        return;
    }
    try {
        thread_ = std::thread([this] { run(); });
    } catch (const std::system_error &error) {
        throw std::runtime_error(std::string("a thread for asynchronous operations cannot be started (") +
                                 error.what() +
                                 "); raise the limit of processes and threads (ulimit -u, or the container's pids "
                                 "limit)");
    }
}

void ProgressThread::add(const Handle &request) {
    const std::lock_guard<std::mutex> held(mutex_);
    if (stop_) {
        unfinished = true;
        new Handle(request);  // the process is ending
        return;
    }
    added_.push_back(request);
    wake_.notify_one();
}

void ProgressThread::stop() {
    {
        const std::lock_guard<std::mutex> held(mutex_);
        stop_ = true;
        wake_.notify_one();
    }
    if (thread_.joinable()) {
        thread_.join();
    }
    if (!requests_.empty()) {
        unfinished = true;
        new std::vector<Handle>(std::move(requests_));  // events that are under way cannot be ended
    }
}

void ProgressThread::abandon() {
    if (thread_.joinable()) {
        thread_.detach();
    }
}

void ProgressThread::run() {
    pthread_setname_np(pthread_self(), "comm-oneccl");
    while (take_new()) {
        // Nobody knows how long a rank that is late, or gone, will be.
        nap_ns_ = test_all() ? shortest_ns : std::min(nap_ns_ + nap_ns_ / 64, longest_ns);
        const timespec nap{0, nap_ns_};
        nanosleep(&nap, nullptr);
    }
}

bool ProgressThread::take_new() {
    std::unique_lock<std::mutex> held(mutex_);
    if (requests_.empty()) {
        wake_.wait(held, [this] { return stop_ || !added_.empty(); });
    }
    if (!added_.empty()) {
        nap_ns_ = shortest_ns;
    }
    requests_.insert(requests_.end(), added_.begin(), added_.end());
    added_.clear();
    return !stop_;
}

bool ProgressThread::test_all() {
    // A thread that waits makes progress for all.
    const bool others_do = waiting.load(std::memory_order_relaxed) > 0;
    const auto is_over = [&](const Handle &one) {
        return (others_do ? one->state.load(std::memory_order_acquire) : one->test()) != pending;
    };
    const size_t before = requests_.size();
    requests_.erase(std::remove_if(requests_.begin(), requests_.end(), is_over), requests_.end());
    return requests_.size() < before;
}

}  // namespace oneccl
