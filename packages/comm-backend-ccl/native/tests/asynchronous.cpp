// Operations that are under way at the same time.

#include "ranks.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

using namespace tests;
using namespace shm;

namespace {

using Clock = std::chrono::steady_clock;

// All kinds, among them messages between all, from a few bytes to several chunks.
std::vector<Job> mix(int size, size_t number, Random &random) {
    constexpr int kinds[] = {all_reduce, shm::reduce, broadcast, all_gather,   reduce_scatter, all_to_all,
                             gather,     scatter,     barrier,   all_to_all_v, send,           send};
    std::vector<Job> jobs;
    for (size_t turn = 0; turn < number; ++turn) {
        Job job;
        job.operation = kinds[random.below(std::size(kinds))];
        choose_kind(job, random.below(1000));
        job.count = job.operation == barrier ? 0 : 1 + random.below(random.below(8) == 0 ? 60000 : 200);
        job.root = is_rooted(job.operation) || job.operation == send
                       ? static_cast<int>(random.below(static_cast<size_t>(size)))
                       : -1;
        if (job.operation == send) {
            job.from = (job.root + 1 + static_cast<int>(random.below(static_cast<size_t>(size - 1)))) % size;
        }
        if (job.operation == all_to_all_v) {
            job.counts.assign(static_cast<size_t>(size), {});
            for (auto &row : job.counts) {
                for (int to = 0; to < size; ++to) {
                    row.push_back(random.below(job.count));
                }
            }
            job.count = 0;
        }
        jobs.push_back(prepared(std::move(job), size, random));
    }
    return jobs;
}

std::vector<std::unique_ptr<Part>> parts_of(const std::vector<Job> &jobs, Group &group) {
    std::vector<std::unique_ptr<Part>> parts;
    for (const Job &job : jobs) {
        if (job.takes_part(group.rank())) {
            parts.push_back(std::make_unique<Part>(job, group));
        }
    }
    return parts;
}

template <class T>
void shuffle(std::vector<T> &values, Random &random) {
    for (size_t i = values.size(); i > 1; --i) {
        std::swap(values[i - 1], values[random.below(i)]);
    }
}

Job message(int from, int to, size_t count) {
    Job job;
    job.operation = send, job.from = from, job.root = to, job.count = count;
    return job;
}

}  // namespace

TEST(started_together_and_waited_for_in_any_order) {
    Random random{options.seed};
    for (const int size : {2, 3, 4, 8}) {
        World world(size);
        for (int round = 0; round < 3; ++round) {
            const std::vector<Job> jobs = mix(size, 40, random);
            world.run([&](Group &group) {
                Random mine{options.seed + static_cast<uint64_t>(group.rank())};
                auto parts = parts_of(jobs, group);
                for (auto &part : parts) {
                    part->start(mine.below(4) == 0);
                }
                shuffle(parts, mine);
                for (auto &part : parts) {
                    part->finish();
                }
            });
        }
    }
}

TEST(polled) {
    Random random{options.seed};
    for (const int size : {2, 4}) {
        World world(size);
        const std::vector<Job> jobs = mix(size, 30, random);
        world.run([&](Group &group) {
            auto parts = parts_of(jobs, group);
            for (auto &part : parts) {
                part->start();
            }
            const auto end = Clock::now() + std::chrono::duration<double>(options.patience);
            for (auto &part : parts) {
                while (!part->poll()) {
                    CHECK(Clock::now() < end, "rank " << group.rank() << " polled for too long");
                    std::this_thread::yield();
                }
                part->finish();
            }
        });
    }
}

// Nobody waits, and all come to an end.
TEST(watched) {
    Random random{options.seed};
    World world(4);
    const std::vector<Job> jobs = mix(4, 30, random);
    world.run([&](Group &group) {
        std::vector<Handle> tasks;
        auto parts = parts_of(jobs, group);
        for (auto &part : parts) {
            tasks.push_back(group.start(part->request(), true));
        }
        const auto end = Clock::now() + std::chrono::duration<double>(options.patience);
        while (std::any_of(tasks.begin(), tasks.end(), [](const Handle &task) { return task->now() == pending; })) {
            CHECK(Clock::now() < end, "rank " << group.rank() << " watched for too long");
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        for (size_t i = 0; i < parts.size(); ++i) {
            CHECK(tasks[i]->now() == complete, "task " << i << ": " << tasks[i]->now());
            parts[i]->finish();
        }
    });
}

// While the progress thread looks by itself, when it ceases to, and long after.
TEST(watched_one_at_a_time) {
    Random random{options.seed};
    constexpr int pauses_us[] = {0, 0, 100, 900, 1100, 5000, 19000, 20000, 21000, 60000};
    std::vector<Job> jobs;
    for (int turn = 0; turn < 60; ++turn) {
        Job job;
        job.operation = turn % 3 == 0 ? broadcast : all_reduce;
        job.root = job.operation == broadcast ? turn % 2 : -1;
        job.count = 1 + random.below(1000);
        jobs.push_back(prepared(std::move(job), 2, random));
    }
    World world(2);
    world.run([&](Group &group) {
        Random mine{options.seed + static_cast<uint64_t>(group.rank())};
        for (const Job &job : jobs) {
            std::this_thread::sleep_for(std::chrono::microseconds(pauses_us[mine.below(std::size(pauses_us))]));
            Part part(job, group);
            const Handle task = group.start(part.request(), true);
            const auto end = Clock::now() + std::chrono::duration<double>(options.patience);
            while (task->now() == pending) {
                CHECK(Clock::now() < end, "rank " << group.rank() << " watched for too long");
                std::this_thread::sleep_for(std::chrono::microseconds(200));
            }
            part.finish();
        }
    });
}

TEST(waited_for_by_several_threads) {
    Random random{options.seed};
    for (int round = 0; round < 8; ++round) {
        World world(3);
        const std::vector<Job> jobs = mix(3, 40, random);
        world.run([&](Group &group) {
            auto parts = parts_of(jobs, group);
            for (auto &part : parts) {
                part->start(round % 2 == 1);
            }
            on_ranks(3, [&](int helper) {
                for (size_t i = static_cast<size_t>(helper); i < parts.size(); i += 3) {
                    parts[i]->finish();
                }
            });
        });
    }
}

// A rank that has done its part in all may have ended: who waits for the last one needs it no more.
TEST(who_is_awaited_behind_an_earlier_operation) {
    World world(3);
    Random random{options.seed};
    std::vector<Job> jobs(2);
    jobs[0].operation = shm::reduce, jobs[0].root = 0, jobs[0].count = 5;
    jobs[1].operation = broadcast, jobs[1].root = 1, jobs[1].count = 5;
    for (Job &job : jobs) {
        job = prepared(std::move(job), 3, random);
    }
    do_all(jobs, world[1]);
    Part first(jobs[0], world[0]);
    const Part second(jobs[1], world[0]);
    first.start();
    const Handle last = world[0].start(second.request(), false);
    CHECK(last->now() == pending && world[0].missing(*last) == 0b100, world[0].missing(*last));
    do_all(jobs, world[2]);
    CHECK(world[0].wait(*last, options.patience) == complete, world[0].failure());
    first.finish();
}

// Of which each waits for room that only the other's reading makes.
TEST(messages_both_ways) {
    Random random{options.seed};
    const Layout layout(4);
    const size_t ring = layout.channel_bytes() / 4;
    for (const size_t count : {size_t{1}, layout.message_bytes / 4 - 4, layout.message_bytes / 4, ring, 3 * ring + 7}) {
        World world(4);
        std::vector<Job> jobs;
        for (int from = 0; from < 4; ++from) {
            for (int to = 0; to < 4; ++to) {
                for (size_t more = 0; more < 3 && from != to; ++more) {
                    jobs.push_back(prepared(message(from, to, count + more), 4, random));
                }
            }
        }
        world.run([&](Group &group) {
            auto parts = parts_of(jobs, group);
            for (auto &part : parts) {
                part->start();
            }
            for (size_t i = parts.size(); i-- > 0;) {
                parts[i]->finish();
            }
        });
    }
}

TEST(messages_one_after_the_other) {
    Random random{options.seed};
    World world(3);
    std::vector<Job> jobs;
    for (int turn = 0; turn < 300; ++turn) {
        jobs.push_back(prepared(message(turn % 3, (turn + 1 + turn / 3 % 2) % 3, 1 + random.below(30000)), 3, random));
    }
    world.run([&](Group &group) { do_all(jobs, group); });
}

// Rank 0 starts on A and waits on B, rank 1 the other way round: the operation that nobody waits for has to go on.
TEST(groups_in_different_orders) {
    Random random{options.seed};
    World a(2), b(2);
    std::vector<Job> jobs;
    for (int turn = 0; turn < 10; ++turn) {
        Job job;
        job.operation = turn % 2 == 0 ? all_reduce : all_to_all;
        job.count = turn < 4 ? 100 : 300000;
        jobs.push_back(prepared(std::move(job), 2, random));
    }
    on_ranks(2, [&](int rank) {
        World &first = rank == 0 ? a : b, &second = rank == 0 ? b : a;
        for (const Job &job : jobs) {
            Part one(job, first[rank]), other(job, second[rank]);
            one.start(true);
            other.start(true);
            other.finish();
            one.finish();
        }
    });
}

TEST(overlapping_groups) {
    Random random{options.seed};
    constexpr int groups = 3;
    World all(3);
    // Pair i is of the ranks i and i + 1.
    World pairs[groups] = {World(2), World(2), World(2)};
    const std::vector<Job> together = mix(3, 20, random), apart = mix(2, 20, random);
    on_ranks(3, [&](int rank) {
        std::vector<std::unique_ptr<Part>> parts;
        const auto start_in = [&](Group &group, const std::vector<Job> &jobs) {
            for (auto &part : parts_of(jobs, group)) {
                part->start(true);
                parts.push_back(std::move(part));
            }
        };
        start_in(pairs[rank][0], apart);
        start_in(all[rank], together);
        start_in(pairs[(rank + 2) % 3][1], apart);
        Random mine{options.seed + static_cast<uint64_t>(rank)};
        shuffle(parts, mine);
        for (auto &part : parts) {
            part->finish();
        }
    });
}
