// One rank that calls oneCCL's allreduce with nothing of ours in between; benchmarks/transports.py starts two of them.
//
//     RANK=0 bare FOLDER MEETING_FD LARGEST_BYTES LIMIT_S
//
// It speaks the line protocol of transports.py's peers, gives oneCCL the settings of comm-backend-ccl's
// native/oneccl, and does what Rank in transports.py does, in the same order.

#include <oneapi/ccl.hpp>

#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t period = 1048573;  // elements after which the data repeats: a prime, so that no two parts are alike
constexpr int ranks = 2;

// A file for each key; oneCCL's ranks find each other by it.
class Folder final : public ccl::kvs_interface {
public:
    explicit Folder(std::string path) : path_(std::move(path)) {}

    ccl::vector_class<char> get(const ccl::string_class &key) override {
        // oneCCL counts the uses of a store under this name, and takes "nothing" for none; everything else it awaits.
        const bool optional = std::strncmp(key.c_str(), "LOCAL_KVS_ID", 12) == 0;
        while (true) {
            std::ifstream file(name(key), std::ios::binary);
            if (file || optional) {
                return ccl::vector_class<char>(std::istreambuf_iterator<char>(file), {});
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }

    void set(const ccl::string_class &key, const ccl::vector_class<char> &value) override {
        const std::string to = name(key), part = to + "." + std::to_string(getpid());
        std::ofstream(part, std::ios::binary).write(value.data(), static_cast<std::streamsize>(value.size()));
        std::rename(part.c_str(), to.c_str());
    }

    int get_id() override { return 1; }

private:
    std::string name(const ccl::string_class &key) const {
        std::string file(key.c_str());
        std::replace(file.begin(), file.end(), '/', '_');
        return path_ + "/" + file;
    }

    std::string path_;
};

// What rank `rank` starts from: multiples of 2^-20, whose sums are exact in float32.
std::vector<double> values(unsigned rank) {
    std::vector<double> made(period);
    uint64_t state = rank + 1;
    for (double &value : made) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        value = static_cast<double>(static_cast<int64_t>(state >> 43) - (1 << 20)) / (1 << 20);
    }
    return made;
}

int64_t cpu_ns() {
    timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return used.tv_sec * 1000000000LL + used.tv_nsec;
}

class Rank {
public:
    Rank(int rank, const std::string &folder, int meeting_fd, size_t largest_bytes)
        : rank_(rank), communicator_(ccl::create_communicator(ranks, rank, std::make_shared<Folder>(folder))) {
        void *shared = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, meeting_fd, 0);
        if (shared == MAP_FAILED) {
            throw std::runtime_error("mmap");
        }
        meeting_ = static_cast<volatile uint8_t *>(shared);
        const std::vector<double> one = values(rank), other = values(1 - rank);
        for (int doubled = 0; doubled < 2; ++doubled) {
            for (size_t i = 0; i < period; ++i) {
                inputs_[doubled].push_back(static_cast<float>(one[i] * (1 + doubled)));
                sums_[doubled].push_back(static_cast<float>((one[i] + other[i]) * (1 + doubled)));
            }
        }
        // In whole cache lines, as torch has it.
        tensor_ = static_cast<float *>(std::aligned_alloc(64, (largest_bytes + 63) / 64 * 64));
        fill(largest_bytes / sizeof(float), 0);
    }

    void run(size_t bytes, int warm_up, int timed) {
        const size_t count = bytes / sizeof(float);
        std::vector<int64_t> times;
        for (int call = 0; call < warm_up + timed; ++call) {
            fill(count, call % 2);
            meet();
            const auto start = std::chrono::steady_clock::now();
            ccl::allreduce(tensor_, tensor_, count, ccl::datatype::float32, ccl::reduction::sum, communicator_).wait();
            const auto end = std::chrono::steady_clock::now();
            if (call >= warm_up) {
                times.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(end - start).count());
            }
        }
        const int wrong = differences(count, (warm_up + timed - 1) % 2);
        answer_ << wrong;
        for (const int64_t time : times) {
            answer_ << ' ' << time;
        }
    }

    std::string answer() {
        std::string text = answer_.str();
        answer_.str("");
        return text;
    }

private:
    void fill(size_t count, int doubled) {
        for (size_t at = 0; at < count; at += period) {
            std::memcpy(tensor_ + at, inputs_[doubled].data(), std::min(period, count - at) * sizeof(float));
        }
    }

    int differences(size_t count, int doubled) const {
        int found = 0;
        for (size_t at = 0; at < count; at += period) {
            found += std::memcmp(tensor_ + at, sums_[doubled].data(), std::min(period, count - at) * sizeof(float)) != 0;
        }
        return found;
    }

    // Returns when the other rank is here too; it may be at the next meeting already.
    void meet() {
        ++met_;
        meeting_[64 * rank_] = met_;
        while (static_cast<uint8_t>(meeting_[64 * (1 - rank_)] - met_) > 1) {
        }
    }

    int rank_;
    ccl::communicator communicator_;
    volatile uint8_t *meeting_;
    uint8_t met_ = 0;
    std::vector<float> inputs_[2], sums_[2];
    float *tensor_;
    std::ostringstream answer_;
};

void serve(char **arguments) {
    const int rank = std::atoi(std::getenv("RANK"));
    std::signal(SIGPIPE, SIG_IGN);  // whoever started this may be gone; the end is the same
    const unsigned limit_s = static_cast<unsigned>(std::atoi(arguments[4]));
    alarm(limit_s);
    // Its own descriptor for the protocol: oneCCL writes to stdout, too.
    FILE *answers = fdopen(dup(STDOUT_FILENO), "w");
    dup2(STDERR_FILENO, STDOUT_FILENO);

    setenv("CCL_LOG_LEVEL", "error", 0);
    setenv("CCL_WORKER_OFFLOAD", "0", 0);
    setenv("CCL_ATL_TRANSPORT", "ofi", 0);
    setenv("CCL_PROCESS_LAUNCHER", "none", 0);
    setenv("CCL_LOCAL_RANK", std::to_string(rank).c_str(), 0);
    setenv("CCL_LOCAL_SIZE", std::to_string(ranks).c_str(), 0);
    setenv("FI_PROVIDER", "tcp", 0);
    setenv("FI_TCP_IFACE", "lo", 0);
    setenv("CCL_ATL_OFI_MAX_RETRY_COUNT", "16", 0);
    setenv("CCL_ALLREDUCE", "nreduce:1048577-max", 0);
    ccl::init();
    Rank one(rank, arguments[1], std::atoi(arguments[2]), std::strtoull(arguments[3], nullptr, 10));
    std::fprintf(answers, "{\"oneCCL\": \"%s\"}\n", ccl::get_library_version().full);
    std::fflush(answers);
    for (std::string line; alarm(0), std::getline(std::cin, line);) {
        const int64_t cpu_before = cpu_ns();
        alarm(limit_s);  // nothing outlives its caller by more
        size_t bytes;
        int warm_up, timed;
        std::istringstream(line) >> bytes >> warm_up >> timed;
        one.run(bytes, warm_up, timed);
        const std::string answer = one.answer();
        std::fprintf(answers, "%lld %lld %s\n", static_cast<long long>(cpu_before), static_cast<long long>(cpu_ns()),
                     answer.c_str());
        std::fflush(answers);
    }
    alarm(limit_s);
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 5) {
        std::cerr << "started by benchmarks/transports.py\n";
        return 2;
    }
    try {
        // Before any thread: what the process starts stays on its core.
        const long cpu = std::atol(std::getenv("BENCHMARK_CORE"));
        cpu_set_t core;
        CPU_ZERO(&core);
        CPU_SET(cpu, &core);
        if (sched_setaffinity(0, sizeof core, &core) != 0) {
            throw std::runtime_error("sched_setaffinity");
        }
        serve(argv);
    } catch (const std::exception &problem) {
        std::cerr << problem.what() << '\n';
        return 1;
    }
    return 0;
}
