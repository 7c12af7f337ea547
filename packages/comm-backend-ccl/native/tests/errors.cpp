// Ranks that disagree: every one of them gets an error, soon, that says what was called where.

#include "ranks.hpp"

#include <cerrno>
#include <chrono>

using namespace tests;
using namespace shm;

namespace {

struct Wrong {
    const char *name;
    Job usual, other;           // what one rank calls instead
    std::string says, or_says;  // of the two calls
};

Job job_of(int operation, size_t count, int dtype = float32, int op = sum, int root = -1) {
    Job job;
    job.operation = operation, job.count = count, job.dtype = dtype, job.op = op, job.root = root;
    return job;
}

std::vector<Wrong> wrongs(size_t count) {
    const std::string n = std::to_string(count), more = std::to_string(count + 1);
    return {
        {"operation", job_of(all_reduce, count), job_of(all_gather, count), "all_reduce(" + n + " x float32, sum)",
         "all_gather(" + n + " x float32)"},
        {"barrier", job_of(barrier, 0), job_of(reduce_scatter, count), "barrier", "reduce_scatter(" + n},
        {"dtype", job_of(all_reduce, count), job_of(all_reduce, count, int32), "float32, sum", "int32, sum"},
        {"op", job_of(reduce_scatter, count), job_of(reduce_scatter, count, float32, maximum), "sum)", "max)"},
        {"count", job_of(all_to_all, count), job_of(all_to_all, count + 1), n + " x ", more + " x "},
        {"count of a broadcast", job_of(broadcast, count, float32, sum, 0),
         job_of(broadcast, count + 1, float32, sum, 0), n + " x ", more + " x "},
        {"root of a broadcast", job_of(broadcast, count, float32, sum, 0), job_of(broadcast, count, float32, sum, 1),
         "root 0", "root 1"},
        {"root of a reduce", job_of(shm::reduce, count, float32, sum, 0), job_of(shm::reduce, count, float32, sum, 1),
         "root 0", "root 1"},
        {"count of a gather", job_of(gather, count, float32, sum, 1), job_of(gather, 2 * count, float32, sum, 1),
         n + " x ", std::to_string(2 * count) + " x "},
        {"gather or scatter", job_of(gather, count, float32, sum, 1), job_of(scatter, count, float32, sum, 1),
         "gather(", "scatter("},
        {"no one waits", job_of(broadcast, count, float32, sum, 0), job_of(shm::reduce, count, float32, sum, 0),
         "broadcast(", "reduce("},
        {"small or large", job_of(all_reduce, 3), job_of(all_reduce, 40000), "all_reduce(3 x ", "all_reduce(40000 x "},
    };
}

// Whether the operation failed, or could not be started because an earlier one had.
bool fails(Group &group, const Request &request) {
    Handle task;
    try {
        task = group.start(request, false);
    } catch (const std::invalid_argument &) {
        return true;
    }
    const auto begin = std::chrono::steady_clock::now();
    const int state = group.wait(*task, options.patience);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    CHECK(state != pending, "rank " << group.rank() << " waited for " << taken.count() << " s");
    return state == failed;
}

// One rank calls something else, and all meet afterwards: a rank that had only to give may have been done before.
void disagree(int size, int who, const Wrong &wrong) {
    World world(size);
    Random random{options.seed};
    const Job usual = prepared(wrong.usual, size, random), other = prepared(wrong.other, size, random);
    Job before = prepared(job_of(all_reduce, 5), size, random);
    std::vector<std::string> texts(static_cast<size_t>(size));
    world.run([&](Group &group) {
        do_all({before, before}, group);
        const Part part(group.rank() == who ? other : usual, group);
        Request meeting;
        meeting.operation = barrier;
        const bool found = fails(group, part.request()) || fails(group, meeting);
        CHECK(found, "rank " << group.rank() << " of " << size << " noticed nothing, with another " << wrong.name
                             << " on rank " << who);
        texts[static_cast<size_t>(group.rank())] = group.failure();
    });
    for (const std::string &text : texts) {
        CHECK(text == texts[0], "'" << text << "' and '" << texts[0] << "'");
    }
    CHECK(texts[0].find(wrong.says) != std::string::npos && texts[0].find(wrong.or_says) != std::string::npos &&
              texts[0].find("operation 3 ") != std::string::npos,
          "another " << wrong.name << " on rank " << who << " of " << size << ": '" << texts[0] << "' names not both '"
                     << wrong.says << "' and '" << wrong.or_says << "' as operation 3");
}

void disagree_all(size_t count) {
    for (const int size : {2, 3, 5}) {
        for (int who = 0; who < size; who += who == 0 ? 1 : size - 2 > 0 ? size - 2 : 1) {
            for (const Wrong &wrong : wrongs(count)) {
                disagree(size, who, wrong);
            }
        }
    }
}

bool is_invalid(Group &group, const Request &request) {
    bool started = true, ran = true;
    try {
        group.start(request, false);
    } catch (const std::invalid_argument &) {
        started = false;
    }
    try {
        group.run(Request(request), 1);
    } catch (const std::invalid_argument &) {
        ran = false;
    }
    return !started && !ran;
}

Request request_of(int operation, int dtype, int op, int root) {
    static char memory[64];
    Request request;
    request.operation = static_cast<uint8_t>(operation), request.dtype = static_cast<uint8_t>(dtype);
    request.op = static_cast<uint8_t>(op), request.root = root, request.count = 1;
    request.input = request.output = memory;
    return request;
}

}  // namespace

TEST(different_small_calls) { disagree_all(10); }
TEST(different_large_calls) { disagree_all(100000); }

TEST(different_calls_of_64_ranks) {
    const auto all = wrongs(10);
    disagree(64, 63, all[0]);
    disagree(64, 1, all[5]);
}

TEST(different_sizes_of_all_to_all_v) {
    for (const size_t count : {size_t{8}, size_t{90000}}) {
        for (int who = 0; who < 3; ++who) {
            World world(3);
            Random random{options.seed};
            Job job = job_of(all_to_all_v, 0);
            job.counts.assign(3, std::vector<size_t>(3, count));
            const Job right = prepared(job, 3, random);
            job.counts[static_cast<size_t>((who + 1) % 3)][static_cast<size_t>(who)] -= 1;
            const Job wrong = prepared(job, 3, random);
            world.run([&](Group &group) {
                const Part part(group.rank() == who ? wrong : right, group);
                Request meeting;
                meeting.operation = barrier;
                CHECK(fails(group, part.request()) || fails(group, meeting), "rank " << group.rank() << ", " << count);
                CHECK(group.failure().find("disagree about how much the one sends to the other: rank ") !=
                          std::string::npos,
                      group.failure());
            });
        }
    }
}

TEST(different_sizes_of_messages) {
    for (const size_t more : {size_t{1}, size_t{100000}}) {
        for (int receiver = 0; receiver < 2; ++receiver) {
            World world(3);
            Random random{options.seed};
            Job job = job_of(send, 10);
            job.from = 1 - receiver, job.root = receiver;
            const Job right = prepared(job, 3, random);
            job.count += more;
            const Job wrong = prepared(job, 3, random);
            world.run([&](Group &group) {
                const Job &mine = group.rank() == 0 ? right : wrong;
                Request meeting;
                meeting.operation = barrier;
                const Part part(mine, group);
                CHECK((mine.takes_part(group.rank()) && fails(group, part.request())) || fails(group, meeting),
                      "rank " << group.rank() << ", " << more << " more");
                CHECK(group.failure().find("disagree about how much the one sends to the other: rank ") !=
                          std::string::npos,
                      group.failure());
            });
        }
    }
}

TEST(invalid_requests) {
    World world(2);
    Group &group = world[0];
    for (const int operation : {static_cast<int>(operations), 200}) {
        CHECK(is_invalid(group, request_of(operation, float32, sum, 0)), operation);
    }
    CHECK(is_invalid(group, request_of(all_reduce, dtypes, sum, -1)), "dtype");
    for (const int operation : {all_reduce, shm::reduce, reduce_scatter}) {
        CHECK(is_invalid(group, request_of(operation, float32, bit_and, 0)), operation);
        CHECK(is_invalid(group, request_of(operation, int32, average, 0)), operation);
        CHECK(is_invalid(group, request_of(operation, int32, ops, 0)), operation);
    }
    for (const int operation : {shm::reduce, broadcast, gather, scatter, send, receive}) {
        for (const int root : {-1, 2, 1000}) {
            if (operation == receive && root == any_source) {
                continue;
            }
            CHECK(is_invalid(group, request_of(operation, float32, sum, root)), operation << ", root " << root);
        }
    }
    CHECK(is_invalid(group, request_of(send, float32, sum, 0)), "to itself");
    CHECK(is_invalid(group, request_of(receive, float32, sum, 0)), "from itself");
    // They left nothing behind.
    Random random{options.seed};
    const std::vector<Job> jobs{prepared(job_of(all_reduce, 100), 2, random)};
    world.run([&](Group &one) { do_all(jobs, one); });
}

TEST(invalid_sizes_of_all_to_all_v) {
    World world(2);
    for (const size_t in : {0, 1, 2, 3}) {
        for (const size_t out : {0, 1, 2, 3}) {
            Request request = request_of(all_to_all_v, int8, sum, -1);
            request.input_counts.assign(in, 1), request.output_counts.assign(out, 1);
            CHECK((in == 2 && out == 2) || is_invalid(world[0], request), in << " and " << out << " sizes for 2 ranks");
        }
    }
}

TEST(why_memory_is_out_of_reach) {
    const std::pair<int, const char *> expected[] = {{ESRCH, "it has ended"},
                                                     {EPERM, "not dumpable"},
                                                     {EACCES, "Yama"},
                                                     {EMFILE, "ulimit"},
                                                     {EFAULT, "Bad address"}};
    for (const auto &[error, words] : expected) {
        World world(2);
        world[0].fail_to_reach(error, 1, 3);
        const std::string text = world[1].failure();
        CHECK(text.find(std::string("rank 0 cannot reach the memory of rank 1: ")) == 0, text);
        CHECK(text.find(words) != std::string::npos, text);
        CHECK((text.find("ended") != std::string::npos) == (error == ESRCH), text);
    }
}
