#include "progress/progress_thread.hpp"

#include "segment/memory.hpp"

#include <pthread.h>
#include <system_error>

namespace shm {

ProgressThread::~ProgressThread() {
    stop();
    join();
}

void ProgressThread::start() {
    const std::lock_guard<std::mutex> alone(worker_mutex_);
    if (stop_ || thread_.joinable()) {
        return;
    }
    try {
        thread_ = std::thread([this] { run(); });
    } catch (const std::system_error &error) {
        throw LimitError(std::string("a thread for asynchronous operations cannot be started (") + error.what() +
                         "); raise the limit of processes and threads (ulimit -u, or the container's pids limit)");
    }
}

void ProgressThread::notify() {
    const std::lock_guard<std::mutex> alone(worker_mutex_);
    if (!stop_ && thread_.joinable()) {
        has_work_ = true;
        wake_.notify_one();
    }
}

void ProgressThread::stop() {
    const std::lock_guard<std::mutex> alone(worker_mutex_);
    stop_ = true;
    wake_.notify_all();
}

void ProgressThread::join() {
    std::thread ending;
    {
        const std::lock_guard<std::mutex> alone(worker_mutex_);
        ending.swap(thread_);  // of several threads that close, one joins it
    }
    if (ending.joinable()) {
        ending.join();
    }
}

void ProgressThread::run() {
    pthread_setname_np(pthread_self(), "comm-shm");
    while (true) {
        {
            std::unique_lock<std::mutex> alone(worker_mutex_);
            wake_.wait(alone, [this] { return stop_ || has_work_; });
            if (stop_) {
                return;
            }
            has_work_ = false;
        }
        while (turn_()) {
        }
    }
}

}  // namespace shm
