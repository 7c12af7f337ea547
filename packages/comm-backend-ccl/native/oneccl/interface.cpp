// oneCCL on host memory behind a C ABI: pointers, sizes, codes; no torch, no Python. No exception leaves a function.

#include "oneccl/group_store.hpp"
#include "oneccl/library.hpp"
#include "oneccl/operations.hpp"
#include "oneccl/progress_thread.hpp"
#include "oneccl/request.hpp"
#include "oneccl/settings.hpp"

#include <pthread.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// oneCCL writes a line to stdout for every setting that is not its default, before it has read CCL_LOG_LEVEL.
extern int oneccl_log_level __asm__("_ZN10ccl_logger5levelE");

using namespace oneccl;

namespace {

constexpr const char *in_child = "oneCCL cannot be used in a forked child";

std::vector<std::weak_ptr<ccl::communicator>> communicators;  // guarded by `library`

void write_message(char *message, int capacity, const char *text) {
    if (capacity > 0) {
        std::strncpy(message, text, static_cast<size_t>(capacity) - 1);
        message[capacity - 1] = '\0';
    }
}

// Returns what `body` does; `otherwise` after an exception, with its text in `message`.
template <class Result, class Body>
Result guarded(Result otherwise, char *message, int capacity, Body body) noexcept {
    try {
        return body();
    } catch (const std::exception &error) {
        write_message(message, capacity, error.what());
    } catch (...) {
        write_message(message, capacity, "an unknown error in oneCCL");
    }
    return otherwise;
}

void refuse_forked() {
    if (forked) {
        throw std::runtime_error(in_child);
    }
}

void in_forked_child() {
    forked = true;
    ProgressThread::instance().abandon();
}

void initialize(const char *libfabric, const char *provider, const char *interface, int local_rank, int local_size) {
    if (getenv("CCL_LOG_LEVEL") == nullptr) {
        oneccl_log_level = 0;
        add_setting("CCL_LOG_LEVEL", "error");
    }
    add_setting("CCL_WORKER_OFFLOAD", "0");
    add_setting("CCL_ATL_TRANSPORT", "ofi");
    add_setting("CCL_PROCESS_LAUNCHER", "none");
    // Each retry connects anew where a rank is gone; what was not sent is tried again at the next test.
    add_setting("CCL_ATL_OFI_MAX_RETRY_COUNT", "16");
    add_setting("CCL_LOCAL_RANK", std::to_string(local_rank));
    add_setting("CCL_LOCAL_SIZE", std::to_string(local_size));
    // Faster than oneCCL's own choice: CCL_ALLREDUCE=ring benchmarks/transports.py.
    add_setting("CCL_ALLREDUCE", "nreduce:1048577-max");
    add_setting("CCL_OFI_LIBRARY_PATH", libfabric);
    add_setting("FI_PROVIDER", provider);
    add_setting("FI_TCP_IFACE", interface);
    const SettingsInEnvironment while_read;
    ccl::init();
    pthread_atfork(nullptr, nullptr, in_forked_child);
}

void forget_ended_communicators() {
    std::vector<std::weak_ptr<ccl::communicator>> left;
    for (const auto &one : communicators) {
        if (!one.expired()) {
            left.push_back(one);
        }
    }
    communicators.swap(left);
}

void leave_without_destructors(int status, void *) {
    fflush(nullptr);
    _exit(status);
}

}  // namespace

// Before each group is made. Strings may be empty for "as oneCCL chooses". `oversubscribed`: ranks share hardware
// threads.
EXPORTED int comm_oneccl_initialize(const char *libfabric, const char *provider, const char *interface, int local_rank,
                                    int local_size, int oversubscribed, char *message, int capacity) {
    return guarded(-1, message, capacity, [&] {
        const LibraryLock held;
        static bool initialized = false;
        if (oversubscribed != 0) {
            ranks_share_cores = true;  // and stays so, for smaller groups of the same ranks
        }
        if (!initialized) {
            initialize(libfabric, provider, interface, local_rank, local_size);
            initialized = true;
        }
        return 0;
    });
}

EXPORTED int comm_oneccl_version(char *text, int capacity) {
    return guarded(-1, text, capacity, [&] {
        write_message(text, capacity, ccl::get_library_version().full);
        return 0;
    });
}

// Waits for all ranks of the group to do the same with the same store.
EXPORTED Group *comm_oneccl_create(int size, int rank, Get get, Set set, void *context, char *message, int capacity) {
    return guarded<Group *>(nullptr, message, capacity, [&] {
        refuse_forked();
        const LibraryLock held;
        const SettingsInEnvironment while_read;
        auto store = std::make_shared<GroupStore>(get, set, context);
        auto made = std::make_shared<ccl::communicator>(ccl::create_communicator(size, rank, store));
        store->close();
        communicators.push_back(made);
        return new Group{std::move(made), size};
    });
}

// Operations under way, such as those that wait for a late rank, keep what they need. The few bytes of the group stay,
// for threads that are about to use it.
EXPORTED void comm_oneccl_destroy(Group *group) {
    guarded(0, nullptr, 0, [&] {
        if (!forked) {
            const LibraryLock held;
            group->communicator.reset();
            forget_ended_communicators();
        }
        return 0;
    });
}

// Starts an operation and sets `made` to a handle, to be given to comm_oneccl_release; -1 after an error.
// `watched`: it has to end even if nobody waits for it.
// Handles go into memory of the caller's: Python may lose what a function returns, where a signal handler raises.
EXPORTED int comm_oneccl_start(const Group *group, const Call *call, int watched, Handle **made, char *message,
                               int capacity) {
    return guarded(-1, message, capacity, [&] {
        refuse_forked();
        auto handle = std::make_unique<Handle>(std::make_shared<Request>());
        Request &request = **handle;
        if (watched) {
            ProgressThread::instance().start();  // once the operation goes on in the caller's memory, nothing may fail
        }
        begin(request, *group, *call);
        if (watched && request.state.load(std::memory_order_relaxed) == pending) {
            try {
                ProgressThread::instance().add(*handle);
            } catch (const std::bad_alloc &) {  // NOLINT(bugprone-empty-catch)
                // It is completed by those who wait.
            }
        }
        *made = handle.release();
        return 0;
    });
}

// 0: still under way after so many seconds; 1: complete; -1: failed, and `message` says how.
EXPORTED int comm_oneccl_wait(const Handle *handle, double seconds, char *message, int capacity) {
    return guarded(-1, message, capacity, [&] {
        refuse_forked();
        Request &request = **handle;
        const int state = wait_for(request, seconds);
        if (state == failed) {
            throw std::runtime_error(request.error);
        }
        return state == complete ? 1 : 0;
    });
}

// When the operation was complete, by the steady clock; 0 where it is not.
EXPORTED int64_t comm_oneccl_ended(const Handle *handle) {
    const Request &request = **handle;
    return request.state.load(std::memory_order_acquire) == complete ? request.ended_ns : 0;
}

// What does not change between calls of one kind.
struct Plan {
    const Group *group;
    int operation, dtype, op, peer;
    double seconds;
};

// Starts an operation and waits for it: 1 if it was complete within the plan's seconds; else 0, and `made` is a handle,
// as of comm_oneccl_start, of what is under way or failed. Without memory for that, the process ends.
EXPORTED int comm_oneccl_run(const Plan *plan, const void *input, void *output, size_t count, Handle **made) noexcept {
    auto request = std::make_shared<Request>();
    try {
        refuse_forked();
        begin(*request, *plan->group,
              {plan->operation, input, output, count, nullptr, nullptr, plan->dtype, plan->op, plan->peer});
        if (wait_for(*request, plan->seconds) == complete) {
            return 1;
        }
    } catch (const std::exception &error) {
        request->error = error.what();
        request->state.store(failed, std::memory_order_release);
    }
    *made = new Handle(std::move(request));  // NOLINT(bugprone-unhandled-exception-at-new): see above
    return 0;
}

// Operations that are still under way are completed all the same.
EXPORTED void comm_oneccl_release(Handle *handle) {
    if (forked) {
        return;
    }
    const bool released = guarded(false, nullptr, 0, [&] {
        if ((*handle)->state.load(std::memory_order_acquire) == pending) {
            ProgressThread::instance().start();
            ProgressThread::instance().add(*handle);
        }
        delete handle;
        return true;
    });
    if (!released) {
        unfinished = true;  // and the handle stays
    }
}

// Before the process ends: static objects of oneCCL must not outlive its communicators. Nothing can be started
// afterwards. Where an operation is under way that cannot be ended, the process leaves without taking oneCCL down.
EXPORTED void comm_oneccl_stop() {
    guarded(0, nullptr, 0, [] {
        if (forked) {
            return 0;
        }
        const bool free = library.try_lock_for(std::chrono::seconds(2));
        if (free) {
            stopped = true;
            library.unlock();
            ProgressThread::instance().stop();
        }
        if (!free || unfinished || under_way.load(std::memory_order_relaxed) > 0) {
            on_exit(leave_without_destructors, nullptr);
            return 0;
        }
        const std::lock_guard<std::timed_mutex> held(library);
        for (const auto &one : communicators) {
            if (const Communicator alive = one.lock()) {
                const ccl::communicator ended = std::move(*alive);
            }
        }
        return 0;
    });
}
