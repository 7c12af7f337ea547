// Ranks that are processes: what they share is a file without a name, and who sleeps is woken by another process.

#include "ranks.hpp"
#include "segment/memory.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <atomic>
#include <cstdio>
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
    const bool crowded = static_cast<unsigned>(size) > std::thread::hardware_concurrency();
    Group group(map_memory(mine, bytes), mine, size, rank, all, crowded, true);
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

}  // namespace

TEST(ranks_are_processes) {
    for (const int size : {2, 3, 5}) {
        run_processes(size);
    }
}
