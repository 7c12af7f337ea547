// How long a cache line takes from one core to another and back: two threads, each on its core, that answer each other.

#include <pthread.h>
#include <sched.h>
#include <atomic>
#include <chrono>
#include <thread>

namespace {

alignas(256) std::atomic<unsigned> question{0};
alignas(256) std::atomic<unsigned> answer{0};

bool stay_on(int core) {
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core, &only);
    return pthread_setaffinity_np(pthread_self(), sizeof(only), &only) == 0;
}

}  // namespace

// Nanoseconds of a round trip, the mean of `times`; negative where a thread may not run on its core.
extern "C" double round_trip_ns(int first_core, int second_core, unsigned times) {
    constexpr unsigned warm_up = 100;
    question = answer = 0;
    std::atomic<bool> possible{true};
    double ns = 0;
    std::thread other([&] {
        possible = stay_on(second_core) && possible;
        for (unsigned number = 1; number <= warm_up + times; ++number) {
            while (question.load(std::memory_order_acquire) != number) {
            }
            answer.store(number, std::memory_order_release);
        }
    });
    std::thread one([&] {
        possible = stay_on(first_core) && possible;
        auto start = std::chrono::steady_clock::now();
        for (unsigned number = 1; number <= warm_up + times; ++number) {
            question.store(number, std::memory_order_release);
            while (answer.load(std::memory_order_acquire) != number) {
            }
            if (number == warm_up) {
                start = std::chrono::steady_clock::now();
            }
        }
        ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / times;
    });
    one.join();
    other.join();
    return possible ? ns : -1;
}
