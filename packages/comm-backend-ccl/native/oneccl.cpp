// oneCCL on host memory behind a C ABI: plain pointers, sizes, codes; no torch, no Python.
//
// One process has one oneCCL, which is not thread-safe: every call into it holds `library`. Progress is made only
// inside such calls (CCL_WORKER_OFFLOAD=0: oneCCL's own worker threads cost milliseconds where ranks share cores), so a
// thread of ours looks after the operations that nobody waits for.

#include <oneapi/ccl.hpp>

#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// oneCCL writes a line to stdout for every setting that is not its default, before it has read CCL_LOG_LEVEL.
extern int oneccl_log_level __asm__("_ZN10ccl_logger5levelE");

namespace {

using Clock = std::chrono::steady_clock;

std::timed_mutex library;
std::atomic<int> waiting{0};
std::atomic<bool> forked{false};
std::atomic<bool> more_ranks_than_cores{false};
bool stopped = false;                 // guarded by `library`
std::atomic<bool> unfinished{false};  // something was left under way, or failed

// Holds the library, for as long as it can be had: oneCCL makes a group without an end where a rank does not come.
struct Alone {
    Alone() {
        if (!library.try_lock() && !library.try_lock_for(std::chrono::seconds(5))) {
            throw std::runtime_error("oneCCL is held up by a group that could not be made; start the process anew");
        }
    }
    ~Alone() { library.unlock(); }
    Alone(const Alone &) = delete;
};

// Returns how many bytes the value has, 0 where there is none yet, -1 to give up.
using Get = int (*)(void *context, const char *key, char *value, int capacity);
using Set = int (*)(void *context, const char *key, const char *value, int size);

int report(char *message, int capacity, const char *text) {
    if (capacity > 0) {
        std::strncpy(message, text, capacity - 1);
        message[capacity - 1] = '\0';
    }
    return -1;
}

// While oneCCL waits for other ranks to write into the store, operations of other groups go on.
struct Released {
    Released() { library.unlock(); }
    ~Released() { library.lock(); }
};

class StoreOfGroup final : public ccl::kvs_interface {
public:
    StoreOfGroup(Get get, Set set, void *context) : get_(get), set_(set), context_(context), id_(next_id_++) {}

    ccl::vector_class<char> get(const ccl::string_class &key) override {
        ccl::vector_class<char> value(16384);
        // oneCCL counts the uses of a store under this name, and takes "nothing" for none; everything else it awaits.
        const bool optional = std::strncmp(key.c_str(), "LOCAL_KVS_ID", 12) == 0;
        Released while_waiting;
        // oneCCL awaits others by asking for the same again and again.
        if (last_ == key.c_str()) {
            pause(200000);
        }
        last_ = key.c_str();
        for (long nap_ns = 100000;; nap_ns = std::min(nap_ns * 2, 5000000L)) {
            const int size = get_(context_, key.c_str(), value.data(), static_cast<int>(value.size()));
            if (size < 0) {
                closed_ = true;  // what ends then sets keys
                throw std::runtime_error("the other ranks did not come");
            }
            if (size > 0 || optional) {
                value.resize(size);
                return value;
            }
            pause(nap_ns);
        }
    }

    void set(const ccl::string_class &key, const ccl::vector_class<char> &value) override {
        if (closed_) {
            return;  // the end of a communicator overwrites its keys, when the store may be gone
        }
        Released while_talking;
        if (set_(context_, key.c_str(), value.data(), static_cast<int>(value.size())) < 0) {
            closed_ = true;
            throw std::runtime_error("the store could not be written");
        }
    }

    int get_id() override { return id_; }

    void close() { closed_ = true; }

private:
    static void pause(long nanoseconds) {
        const timespec nap{0, nanoseconds};
        nanosleep(&nap, nullptr);
    }

    static int next_id_;
    Get get_;
    Set set_;
    void *context_;
    int id_;
    std::string last_;
    bool closed_ = false;
};

int StoreOfGroup::next_id_ = 1;

enum State { pending = 0, complete = 1, failed = 2 };

using Communicator = std::shared_ptr<ccl::communicator>;

struct Request {
    Communicator on;  // oneCCL uses it until the end of the operation
    ccl::event event;
    std::atomic<int> state{pending};
    int64_t ended_ns = 0;  // by the steady clock, when `state` was first seen to be complete
    std::string error;

    ~Request() {
        if (on && state.load(std::memory_order_acquire) == pending) {
            leak();
        }
    }

    // Whoever calls this makes progress with everything that is under way in this process.
    int test() {
        int now = state.load(std::memory_order_acquire);
        if (now != pending) {
            return now;
        }
        if (!library.try_lock() && !library.try_lock_for(std::chrono::milliseconds(50))) {
            return pending;
        }
        std::lock_guard<std::timed_mutex> alone(library, std::adopt_lock);
        return test_alone();
    }

    // The end of an event that is not complete throws, where it must not.
    void leak() {
        new ccl::event(std::move(event));
        new Communicator(std::move(on));
        unfinished = true;
    }

    int test_alone() {
        int now = state.load(std::memory_order_acquire);
        if (now != pending || stopped) {
            return now;
        }
        try {
            if (!event.test()) {
                return pending;
            }
            // The end of either is a call into oneCCL.
            event = ccl::event();
            on.reset();
            ended_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
            now = complete;
        } catch (const std::exception &problem) {
            error = problem.what();
            now = failed;
            leak();
        }
        state.store(now, std::memory_order_release);
        return now;
    }
};

using Handle = std::shared_ptr<Request>;

// Looks after operations that were started asynchronously, so that they come to an end without their caller.
class Caretaker {
public:
    void watch(const Handle &request) {
        std::lock_guard<std::mutex> alone(mutex_);
        if (stop_) {
            unfinished = true;
            new Handle(request);  // the process is ending
            return;
        }
        if (!thread_.joinable()) {
            thread_ = std::thread([this] { run(); });
        }
        requests_.push_back(request);
        wake_.notify_one();
    }

    void stop() {
        {
            std::lock_guard<std::mutex> alone(mutex_);
            stop_ = true;
            wake_.notify_one();
        }
        if (thread_.joinable()) {
            thread_.join();
        }
        if (!mine_.empty()) {
            unfinished = true;
            new std::vector<Handle>(std::move(mine_));  // events that are under way cannot be ended
        }
    }

    // The thread does not exist in a forked child, and must not be joined there.
    void abandon() {
        if (thread_.joinable()) {
            thread_.detach();
        }
    }

private:
    void run() {
        pthread_setname_np(pthread_self(), "comm-oneccl");
        long nap_ns = shortest_ns;
        while (true) {
            {
                std::unique_lock<std::mutex> alone(mutex_);
                if (mine_.empty()) {
                    wake_.wait(alone, [this] { return stop_ || !requests_.empty(); });
                }
                if (!requests_.empty()) {
                    nap_ns = shortest_ns;
                }
                mine_.insert(mine_.end(), requests_.begin(), requests_.end());
                requests_.clear();
                if (stop_) {
                    return;
                }
            }
            // Who waits makes progress for all.
            const bool others_do = waiting.load(std::memory_order_relaxed) > 0;
            std::vector<Handle> left;
            for (const Handle &request : mine_) {
                const int state = others_do ? request->state.load(std::memory_order_acquire) : request->test();
                if (state == pending) {
                    left.push_back(request);
                }
            }
            // Nobody knows how long a rank that is late, or gone, will be.
            nap_ns = left.size() < mine_.size() ? shortest_ns : std::min(nap_ns + nap_ns / 64, 1000000L);
            mine_.swap(left);
            const timespec nap{0, nap_ns};
            nanosleep(&nap, nullptr);
        }
    }

    static constexpr long shortest_ns = 20000;

    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<Handle> requests_;  // those that the thread has not seen yet
    std::vector<Handle> mine_;      // the thread's own
    std::thread thread_;
    bool stop_ = false;
};

Caretaker &caretaker = *new Caretaker;  // its thread may outlive static objects

void in_forked_child() {
    forked = true;
    caretaker.abandon();
}

struct Group {
    Communicator communicator;
    int size;
};

std::vector<std::weak_ptr<ccl::communicator>> communicators;  // guarded by `library`

std::vector<std::pair<std::string, std::string>> settings;  // guarded by `library`

void setting(const char *name, const std::string &value) {
    if (!value.empty()) {
        settings.emplace_back(name, value);
    }
}

// oneCCL and libfabric read their settings from the environment, which programs started from here would inherit. What
// the user has set stays.
struct InEnvironment {
    InEnvironment() {
        for (auto &one : settings) {
            if (getenv(one.first.c_str()) == nullptr) {
                setenv(one.first.c_str(), one.second.c_str(), 1);
                ours_.push_back(&one);
            }
        }
    }
    ~InEnvironment() {
        for (auto *one : ours_) {
            // oneCCL adds to some, such as a second provider, and that once only.
            if (const char *now = getenv(one->first.c_str())) {
                one->second = now;
            }
            unsetenv(one->first.c_str());
        }
    }

private:
    std::vector<std::pair<std::string, std::string> *> ours_;
};

enum Operation { all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, all_to_all_v, send, receive };

ccl::event start(Group &group, int operation, const void *input, void *output, size_t count, const size_t *input_counts,
                 const size_t *output_counts, ccl::datatype dtype, ccl::reduction op, int peer) {
    const ccl::communicator &on = *group.communicator;
    void *in_place = const_cast<void *>(input);
    switch (operation) {
    case all_reduce:
        return ccl::allreduce(input, output, count, dtype, op, on);
    case reduce:
        return ccl::reduce(input, output, count, dtype, op, peer, on);
    case broadcast:
        return ccl::broadcast(output, count, dtype, peer, on);
    case all_gather: {
        const ccl::vector_class<size_t> counts(group.size, count);
        return ccl::allgatherv(input, count, output, counts, dtype, on);
    }
    case reduce_scatter:
        return ccl::reduce_scatter(input, output, count, dtype, op, on);
    case all_to_all:
        return ccl::alltoall(input, output, count, dtype, on);
    case all_to_all_v: {
        const ccl::vector_class<size_t> sent(input_counts, input_counts + group.size);
        const ccl::vector_class<size_t> received(output_counts, output_counts + group.size);
        return ccl::alltoallv(input, sent, output, received, dtype, on);
    }
    case send:
        return ccl::send(in_place, count, dtype, peer, on);
    case receive:
        return ccl::recv(output, count, dtype, peer, on);
    default:
        throw std::invalid_argument("unknown operation " + std::to_string(operation));
    }
}

void begin(Request &request, void *group, int operation, const void *input, void *output, size_t count,
           const size_t *input_counts, const size_t *output_counts, int dtype, int op, int peer) {
    Alone alone;
    if (stopped) {
        throw std::runtime_error("the process is ending");
    }
    Group &on = *static_cast<Group *>(group);
    if (!on.communicator) {
        throw std::runtime_error("the group was destroyed");
    }
    request.on = on.communicator;
    request.event = start(on, operation, input, output, count, input_counts, output_counts,
                          static_cast<ccl::datatype>(dtype), static_cast<ccl::reduction>(op), peer);
    request.test_alone();
}

int wait_for(Request &request, double seconds) {
    int state = request.test();
    if (state != pending || seconds <= 0) {
        return state;
    }
    waiting.fetch_add(1, std::memory_order_relaxed);
    const auto begin = Clock::now();
    const auto end = begin + std::chrono::duration<double>(seconds);
    const auto patience = begin + std::chrono::milliseconds(20);
    for (unsigned tries = 1; state == pending; ++tries) {
        state = request.test();
        if (more_ranks_than_cores) {
            sched_yield();
        }
        if (tries % 64 == 0) {
            const auto now = Clock::now();
            if (now >= end) {
                break;
            }
            if (now >= patience) {
                sched_yield();
            }
        }
    }
    waiting.fetch_sub(1, std::memory_order_relaxed);
    return state;
}

}  // namespace

// Once in a process, before anything else. Strings may be empty for "as oneCCL likes it".
EXPORTED int comm_oneccl_initialize(const char *libfabric, const char *provider, const char *interface, int local_rank,
                                    int local_size, char *message, int capacity) try {
    Alone alone;
    static bool initialized = false;
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof(cores), &cores) == 0 && local_size > CPU_COUNT(&cores)) {
        more_ranks_than_cores = true;  // and stays so, for smaller groups of the same ranks
    }
    if (initialized) {
        return 0;
    }
    try {
        if (getenv("CCL_LOG_LEVEL") == nullptr) {
            oneccl_log_level = 0;
            setting("CCL_LOG_LEVEL", "error");
        }
        setting("CCL_WORKER_OFFLOAD", "0");
        setting("CCL_ATL_TRANSPORT", "ofi");
        setting("CCL_PROCESS_LAUNCHER", "none");
        // Each retry connects anew where a rank is gone; what was not sent is tried again at the next test.
        setting("CCL_ATL_OFI_MAX_RETRY_COUNT", "16");
        setting("CCL_LOCAL_RANK", std::to_string(local_rank));
        setting("CCL_LOCAL_SIZE", std::to_string(local_size));
        // Faster than oneCCL's own choice: CCL_ALLREDUCE=ring benchmarks/transports.py.
        setting("CCL_ALLREDUCE", "nreduce:1048577-max");
        setting("CCL_OFI_LIBRARY_PATH", libfabric);
        setting("FI_PROVIDER", provider);
        setting("FI_TCP_IFACE", interface);
        const InEnvironment while_read;
        ccl::init();
        pthread_atfork(nullptr, nullptr, in_forked_child);
    } catch (const std::exception &problem) {
        return report(message, capacity, problem.what());
    }
    initialized = true;
    return 0;
} catch (const std::exception &problem) {
    return report(message, capacity, problem.what());
}

EXPORTED int comm_oneccl_version(char *text, int capacity) {
    const ccl::library_version version = ccl::get_library_version();
    report(text, capacity, version.full);
    return 0;
}

// Waits for all ranks of the group to do the same with the same store.
EXPORTED void *comm_oneccl_create(int size, int rank, Get get, Set set, void *context, char *message, int capacity) {
    if (forked) {
        report(message, capacity, "oneCCL cannot be used in a forked child");
        return nullptr;
    }
    try {
        Alone alone;
        const InEnvironment while_read;
        auto store = std::make_shared<StoreOfGroup>(get, set, context);
        auto made = std::make_shared<ccl::communicator>(ccl::create_communicator(size, rank, store));
        store->close();
        communicators.push_back(made);
        return new Group{std::move(made), size};
    } catch (const std::exception &problem) {
        report(message, capacity, problem.what());
        return nullptr;
    }
}

// Operations that are under way, such as those that a late rank keeps up, keep what they need.
EXPORTED void comm_oneccl_destroy(void *group) {
    if (forked) {
        return;
    }
    if (!library.try_lock() && !library.try_lock_for(std::chrono::seconds(5))) {
        return;  // and it stays, as does what holds the library up
    }
    std::lock_guard<std::timed_mutex> alone(library, std::adopt_lock);
    // The few bytes of the group stay, for threads that are about to use it.
    static_cast<Group *>(group)->communicator.reset();
    std::vector<std::weak_ptr<ccl::communicator>> left;
    for (const auto &one : communicators) {
        if (!one.expired()) {
            left.push_back(one);
        }
    }
    communicators.swap(left);
}

// Starts an operation and gives a handle, to be given back to comm_oneccl_release; nullptr after an error.
// Counts are of elements. `watched`: it has to come to an end even if nobody waits for it.
EXPORTED void *comm_oneccl_start(void *group, int operation, const void *input, void *output, size_t count,
                                 const size_t *input_counts, const size_t *output_counts, int dtype, int op, int peer,
                                 int watched, char *message, int capacity) {
    if (forked) {
        report(message, capacity, "oneCCL cannot be used in a forked child");
        return nullptr;
    }
    try {
        auto request = std::make_shared<Request>();
        begin(*request, group, operation, input, output, count, input_counts, output_counts, dtype, op, peer);
        if (watched && request->state.load(std::memory_order_relaxed) == pending) {
            caretaker.watch(request);
        }
        return new Handle(std::move(request));
    } catch (const std::exception &problem) {
        report(message, capacity, problem.what());
        return nullptr;
    }
}

// 0: still under way after so many seconds; 1: complete; -1: failed, and `message` says how.
EXPORTED int comm_oneccl_wait(void *handle, double seconds, char *message, int capacity) {
    if (forked) {
        return report(message, capacity, "oneCCL cannot be used in a forked child");
    }
    Request &request = **static_cast<Handle *>(handle);
    const int state = wait_for(request, seconds);
    if (state == failed) {
        return report(message, capacity, request.error.c_str());
    }
    return state == complete ? 1 : 0;
}

// When the operation was complete, by the steady clock; 0 where it is not.
EXPORTED int64_t comm_oneccl_ended(void *handle) {
    const Request &request = **static_cast<Handle *>(handle);
    return request.state.load(std::memory_order_acquire) == complete ? request.ended_ns : 0;
}

// What does not change between calls of one kind.
struct Plan {
    void *group;
    int operation, dtype, op, peer;
    double seconds;
};

// Starts an operation and waits for it: 1 if it was complete within the plan's seconds, else a handle, as of
// comm_oneccl_start, of what is under way or failed.
EXPORTED uintptr_t comm_oneccl_run(const Plan *plan, const void *input, void *output, size_t count) {
    auto request = std::make_shared<Request>();
    try {
        if (forked) {
            throw std::runtime_error("oneCCL cannot be used in a forked child");
        }
        begin(*request, plan->group, plan->operation, input, output, count, nullptr, nullptr, plan->dtype, plan->op,
              plan->peer);
        if (wait_for(*request, plan->seconds) == complete) {
            return 1;
        }
    } catch (const std::exception &problem) {
        request->error = problem.what();
        request->state.store(failed, std::memory_order_release);
    }
    return reinterpret_cast<uintptr_t>(new Handle(std::move(request)));
}

EXPORTED void comm_oneccl_release(void *handle) {
    auto *request = static_cast<Handle *>(handle);
    if (forked) {
        return;
    }
    try {
        if ((*request)->state.load(std::memory_order_acquire) == pending) {
            caretaker.watch(*request);  // oneCCL goes on with it
        }
        delete request;
    } catch (const std::exception &) {
        unfinished = true;  // and the handle stays
    }
}

// Before the process ends: static objects of oneCCL must not outlive its communicators. Nothing can be started
// afterwards. Where something is under way that cannot be ended, the process leaves without taking oneCCL down.
EXPORTED void comm_oneccl_stop() {
    if (forked) {
        return;
    }
    const bool free = library.try_lock_for(std::chrono::seconds(2));
    if (free) {
        stopped = true;
        library.unlock();
        caretaker.stop();
    }
    if (!free || unfinished) {
        on_exit(
            [](int status, void *) {
                fflush(nullptr);
                _exit(status);
            },
            nullptr);
        return;
    }
    std::lock_guard<std::timed_mutex> alone(library);
    for (const auto &one : communicators) {
        if (const Communicator alive = one.lock()) {
            const ccl::communicator ended = std::move(*alive);
        }
    }
}
