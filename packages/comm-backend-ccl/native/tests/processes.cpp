// Ranks that are processes: what they share is a file without a name, and who sleeps is woken by another process.

#include "ranks.hpp"
#include "segment/memory.hpp"
#include "segment/peer_memory.hpp"
#include "segment/peer_windows.hpp"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <new>
#include <thread>

using namespace tests;
using namespace shm;

namespace {

struct Pids {
    std::atomic<int> of[max_ranks];
};

std::vector<Job> some_jobs(int size) {
    Random random{options.seed + static_cast<uint64_t>(size)};
    std::vector<Job> jobs;
    size_t turn = 0;
    for (const int operation : {all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, send, barrier}) {
        for (const size_t count : {size_t{5}, size_t{3000}, size_t{70000}}) {
            Job job;
            job.operation = operation;
            choose_kind(job, ++turn);
            job.root = is_rooted(operation) || operation == send ? 0 : -1;
            job.from = operation == send ? size - 1 : -1;
            job.count = operation == barrier ? 0 : count;
            jobs.push_back(prepared(std::move(job), size, random));
        }
    }
    return jobs;
}

void be_rank(int rank, int size, int parent, int descriptor, uint64_t inode, Pids &pids, const std::vector<Job> &jobs) {
    pids.of[rank].store(getpid());
    std::vector<int> all(static_cast<size_t>(size));
    for (int one = 0; one < size; ++one) {
        while ((all[static_cast<size_t>(one)] = pids.of[one].load()) == 0) {
            usleep(1000);
        }
    }
    const size_t bytes = Layout(size).end;
    const int mine = open_memory(parent, descriptor, inode, bytes);
    const bool oversubscribed = static_cast<unsigned>(size) > std::thread::hardware_concurrency();
    Group group(map_memory(mine, bytes), mine, size, rank, all, oversubscribed, true);
    for (size_t one = 0; one < jobs.size(); ++one) {
        if (one % static_cast<size_t>(size) == static_cast<size_t>(rank)) {
            usleep(20000);  // longer than the others spin
        }
        do_all({jobs[one]}, group);
    }
}

void run_processes(int size) {
    const std::vector<Job> jobs = some_jobs(size);
    const int parent = getpid(), descriptor = create_memory(Layout(size).end);
    const uint64_t inode = inode_of(descriptor);
    auto *pids = new (map_memory(create_memory(sizeof(Pids)), sizeof(Pids))) Pids{};
    std::vector<int> children;
    for (int rank = 0; rank < size; ++rank) {
        const int child = fork();
        CHECK(child >= 0, "no process for rank " << rank);
        if (child == 0) {
            alarm(options.limit);  // which is not inherited
            try {
                be_rank(rank, size, parent, descriptor, inode, *pids, jobs);
            } catch (const std::exception &error) {
                std::fprintf(stderr, "rank %d of %d: %s\n", rank, size, error.what());
                _exit(1);
            }
            _exit(0);
        }
        children.push_back(child);
    }
    int failures = 0;
    for (const int child : children) {
        int status = 0;
        waitpid(child, &status, 0);
        failures += WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : 1;
    }
    close_memory(descriptor);
    unmap_memory(pids, sizeof(Pids));
    CHECK(failures == 0, failures << " of " << size << " processes");
}

// A process that is not dumpable is closed to others of its user, except to root.
void be_refused() {
    if (getuid() == 0 && setuid(65534) != 0) {
        throw std::runtime_error("cannot give up root");
    }
    int pipes[2];
    CHECK(pipe(pipes) == 0, std::strerror(errno));
    const int value = 1, pid = fork();
    if (pid == 0) {
        prctl(PR_SET_DUMPABLE, 0);
        static_cast<void>(!write(pipes[1], &value, 1));
        pause();
        _exit(0);
    }
    char byte;
    CHECK(read(pipes[0], &byte, 1) == 1, std::strerror(errno));
    int here = 0, error = 0;
    const auto reads = [&] { return read_peer(pid, &here, reinterpret_cast<uint64_t>(&value), sizeof(here)); };
    const bool has_read = reads();
    const int refusal = errno;
    PeerWindows windows;
    const bool has_mapped = windows.find(pid, Place{1, 0, pipes[0]}, error) != nullptr;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    CHECK(!has_read && refusal == EPERM, std::strerror(refusal));
    CHECK(!has_mapped && error == EACCES, std::strerror(error));
    CHECK(!reads() && errno == ESRCH, std::strerror(errno));
    CHECK(windows.find(pid, Place{1, 0, pipes[0]}, error) == nullptr && error == ESRCH, std::strerror(error));
}

}  // namespace

TEST(refused_memory_is_not_that_of_an_ended_process) {
    const int there = 1;
    int here = 0;
    if (!read_peer(getpid(), &here, reinterpret_cast<uint64_t>(&there), sizeof(there))) {
        std::printf("       without process_vm_readv: %s\n", std::strerror(errno));
        return;
    }
    const int child = fork();
    if (child == 0) {
        alarm(options.limit);
        try {
            be_refused();
        } catch (const std::exception &error) {
            std::fprintf(stderr, "%s\n", error.what());
            _exit(1);
        }
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, status);
}

TEST(ranks_are_processes) {
    for (const int size : {2, 3, 5}) {
        run_processes(size);
    }
}
