// Groups that end while something is left to do.

#include "ranks.hpp"

#include <chrono>
#include <thread>

using namespace tests;
using namespace shm;

namespace {

// Several steps, of which one rank alone can do the first.
Job large(int operation = all_reduce) {
    Job job;
    job.operation = operation;
    job.count = 200000;
    return job;
}

std::vector<Job> one(Job job, int size) {
    Random random{options.seed};
    std::vector<Job> jobs;
    jobs.push_back(prepared(std::move(job), size, random));
    return jobs;
}

// How long it takes, in seconds, until `task` is no longer under way.
double until_over(Group &group, Task &task, int state) {
    const auto begin = std::chrono::steady_clock::now();
    const int found = group.wait(task, options.patience);
    CHECK(found == state, "state " << found << " after " << options.patience << " s: " << group.failure());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

TEST(closed_while_a_thread_waits) {
    for (const bool watched : {false, true}) {
        for (int turn = 0; turn < 20; ++turn) {
            World world(2);
            const std::vector<Job> jobs = one(large(), 2);
            Part part(jobs[0], world[0]);
            const Handle task = world[0].start(part.request(), watched);
            std::thread waiting([&] { until_over(world[0], *task, failed); });
            std::this_thread::sleep_for(std::chrono::milliseconds(turn % 4));
            world[0].close();
            waiting.join();
            CHECK(task->now() == failed, task->now());
            CHECK(world[0].failure() == "the group was destroyed", world[0].failure());
        }
    }
}

TEST(closed_by_two_threads) {
    for (int turn = 0; turn < 50; ++turn) {
        World world(2);
        const std::vector<Job> jobs = one(large(), 2);
        Part part(jobs[0], world[0]);
        const Handle task = world[0].start(part.request(), true);
        on_ranks(2, [&](int) { world[0].close(); });
        CHECK(task->now() == failed, task->now());
    }
}

TEST(closed_for_new_operations) {
    World world(2);
    world[0].close();
    Request request;
    request.operation = barrier;
    for (const bool shortly : {false, true}) {
        bool thrown = false;
        try {
            shortly ? world[0].run(Request(request), 10) : world[0].start(request, false);
        } catch (const std::invalid_argument &) {
            thrown = true;
        }
        CHECK(thrown, "a closed group took an operation");
    }
}

// A handle outlives its group; what it stands for has failed.
TEST(destroyed_with_operations_under_way) {
    for (int operation = 0; operation < 4; ++operation) {
        World world(2);
        Job job = operation < 2 ? large(operation == 0 ? all_reduce : all_to_all) : large(send);
        if (operation >= 2) {
            job.from = operation == 2 ? 0 : 1, job.root = 1 - job.from;
        }
        const std::vector<Job> jobs = one(std::move(job), 2);
        Handle task;
        {
            const Part part(jobs[0], world[0]);
            task = world[0].start(part.request(), operation % 2 == 0);
            world.close(0);
        }
        CHECK(task->now() == failed, "operation " << operation << ": " << task->now());
    }
}

// Who is done may leave: the others find what it left.
TEST(closed_by_who_is_done) {
    Random random{options.seed};
    for (int turn = 0; turn < 10; ++turn) {
        World world(4);
        std::vector<Job> jobs;
        for (const int operation : {all_reduce, all_gather, broadcast, gather, all_to_all}) {
            Job job;
            job.operation = operation;
            job.count = turn % 2 == 0 ? 100 : 50000;
            job.root = is_rooted(operation) ? turn % 4 : -1;
            jobs.push_back(prepared(std::move(job), 4, random));
        }
        on_ranks(4, [&](int rank) {
            do_all(jobs, world[rank]);
            world.close(rank);
        });
    }
}

// Closing a group does not disturb another of the same ranks.
TEST(closed_beside_another) {
    Random random{options.seed};
    World lasting(3);
    std::vector<Job> jobs;
    for (int turn = 0; turn < 60; ++turn) {
        Job job;
        job.operation = turn % 2 == 0 ? all_reduce : all_gather;
        job.count = 1 + random.below(20000);
        jobs.push_back(prepared(std::move(job), 3, random));
    }
    on_ranks(4, [&](int rank) {
        if (rank < 3) {
            return do_all(jobs, lasting[rank]);
        }
        for (int turn = 0; turn < 30; ++turn) {
            World other(3);
            const std::vector<Job> left = one(large(), 3);
            const Part part(left[0], other[0]);
            other[0].start(part.request(), turn % 2 == 0);
        }
    });
}
