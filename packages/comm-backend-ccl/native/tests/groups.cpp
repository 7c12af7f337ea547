// Every operation in groups of 1 to 64 ranks, with sizes on both sides of every limit.

#include "algorithms/eager.hpp"
#include "algorithms/single_copy.hpp"
#include "ranks.hpp"
#include "segment/peer_memory.hpp"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>

using namespace tests;
using namespace shm;

namespace {

constexpr int collectives[] = {all_reduce, shm::reduce,  broadcast, all_gather, reduce_scatter,
                               all_to_all, all_to_all_v, gather,    scatter,    barrier};

// Bytes of one rank's part.
std::vector<size_t> sizes_for(Group &group, int operation) {
    const size_t pieces = is_cut(operation) ? static_cast<size_t>(group.size()) : 1;
    const size_t small = small_bytes(group) / pieces, slot = group.layout().chunk_bytes() / pieces;
    std::vector<size_t> sizes{1, 3 * 8, 13 * 8, 1000, small - 8, small, small + 8, slot - 8, slot, slot + 8};
    const size_t ring = group.layout().ring_bytes() / pieces;
    sizes.insert(sizes.end(), {(size_t{16} << 10) + 8, 2 * slot + 1000, 9 * slot + 24, ring, ring + 8});
    // What all ranks together get of a gather or an exchange grows with the square of the ranks.
    const size_t most = options.most_bytes / static_cast<size_t>(group.size()) /
                        (operation == all_gather || is_cut(operation) ? static_cast<size_t>(group.size()) : 1);
    std::erase_if(sizes, [&](size_t bytes) { return bytes > most; });
    return sizes;
}

void vary_counts(Job &job, size_t size, Random &random) {
    job.counts.assign(size, std::vector<size_t>(size));
    for (auto &row : job.counts) {
        for (size_t &count : row) {
            count = random.below(4) == 0 ? 0 : random.below(2 * job.count) + 1;
        }
    }
    job.count = 0;
}

// Containers may forbid it, and emulators have no process_vm_readv; the ranks then have to find out and do without.
bool can_read_memory() {
    const int there = 1;
    int here = 0;
    const bool can = read_peer(getpid(), &here, reinterpret_cast<uint64_t>(&there), sizeof(there));
    if (!can) {
        std::printf("       without single copies: process_vm_readv: %s\n", std::strerror(errno));
    }
    return can;
}

// Until the ranks know whether they can read each other's memory.
void learn_to_read(World &world, Random &random) {
    std::vector<Job> jobs;
    for (int turn = 0; turn < 20; ++turn) {
        Job job;
        job.operation = all_reduce, job.count = 5000;
        jobs.push_back(prepared(std::move(job), world.size(), random));
    }
    world.run([&](Group &group) { do_all(jobs, group); });
}

// Another order on every rank.
std::vector<std::vector<int>> shuffled_orders(int size) {
    Random random{options.seed + 1};
    std::vector<std::vector<int>> orders(static_cast<size_t>(size));
    for (int rank = 0; rank < size; ++rank) {
        std::vector<int> &order = orders[static_cast<size_t>(rank)];
        for (int other = 0; other < size; ++other) {
            if (other != rank) {
                order.insert(order.begin() + static_cast<std::ptrdiff_t>(random.below(order.size() + 1)), other);
            }
        }
    }
    return orders;
}

void every_operation(int size, Transfer transfer, const std::vector<std::vector<int>> &reading_orders = {},
                     shm::RingSize ring = shm::RingSize::usual) {
    Random random{options.seed + static_cast<uint64_t>(size)};
    World world(size, reading_orders);
    for (int rank = 0; rank < size; ++rank) {
        world[rank].tuner().fix(transfer, ring);
    }
    learn_to_read(world, random);
    const bool can_read = size == 1 || can_read_memory();
    for (int rank = 0; rank < size; ++rank) {
        CHECK(world[rank].tuner().can_read_peers() == can_read,
              "rank " << rank << (can_read ? " cannot read its own memory" : " reads what it cannot"));
    }
    // Without single copies, the same as in another test of so many ranks; a part of it shows the fall-back.
    const size_t every = transfer == single_copy && !can_read && size <= 3 ? 3 : 1;
    size_t turn = 0, round = 0;
    for (const int operation : collectives) {
        for (const size_t bytes : sizes_for(world[0], operation)) {
            if (++round % every != 0) {
                continue;
            }
            std::vector<Job> jobs;
            // All roots with little, one or two with much.
            const int step = size <= 8 && bytes <= 1000 ? 1 : std::max(1, size / 2);
            for (int root = static_cast<int>(turn) % step; root < size; root += is_rooted(operation) ? step : size) {
                Job job;
                job.operation = operation;
                job.root = is_rooted(operation) ? root : -1;
                choose_kind(job, ++turn);
                job.count = operation == barrier ? 0 : std::max<size_t>(1, bytes / job.item());
                if (operation == all_to_all_v) {
                    vary_counts(job, static_cast<size_t>(size), random);
                }
                jobs.push_back(prepared(std::move(job), size, random));
            }
            world.run([&](Group &group) { do_all(jobs, group); });
        }
    }
}

// What all ranks have learned; they have to have learned the same.
std::vector<Tuner::Known> learned_alike(World &world) {
    std::vector<std::string> learned;
    for (int rank = 0; rank < world.size(); ++rank) {
        std::string text;
        for (const Tuner::Known &one : world[rank].known_methods()) {
            text += std::to_string(one.operation) + " from " + std::to_string(one.least_bytes) + ": " + one.best.name();
            for (const auto &[method, ns] : one.typical_ns) {
                text += ", " + method.name() + " " + std::to_string(ns);
            }
            text += "; ";
        }
        learned.push_back(text);
    }
    CHECK(std::adjacent_find(learned.begin(), learned.end(), std::not_equal_to<>()) == learned.end(),
          "ranks learned differently: " << learned.front() << "\n"
                                        << learned.back());
    return world[0].known_methods();
}

// Parts of changing sizes, of which each rank knows its own: all have to choose alike for them.
void exchanges_of_any_size(int size, bool in_turns) {
    Random random{options.seed + static_cast<uint64_t>(size)};
    World world(size);
    const size_t largest = small_bytes(world[0]) / static_cast<size_t>(size) / sizeof(float);
    for (int round = 0; round < 4; ++round) {
        std::vector<Job> jobs;
        for (int turn = 0; turn < 60; ++turn) {
            Job job;
            job.operation = all_to_all_v;
            // Mostly of one kind, so that something is learned, and now and then less, or more than fits at once.
            job.count = !in_turns ? largest / 2 : random.below(6) > 0 ? largest / 4 : 1 + random.below(2 * largest);
            vary_counts(job, static_cast<size_t>(size), random);
            jobs.push_back(prepared(std::move(job), size, random));
        }
        world.run([&](Group &group) { do_all(jobs, group); });
    }
    const std::vector<Tuner::Known> learned = learned_alike(world);
    CHECK(std::any_of(learned.begin(), learned.end(),
                      [](const Tuner::Known &one) {
                          return one.operation == all_to_all_v && one.is_eager && one.least_bytes >= slot_bytes;
                      }),
          "there is no choice for small exchanges");
}

// The largest calls choose for each of their segments, and learn from it: one call tries everything.
void calls_in_segments(int size) {
    Random random{options.seed + static_cast<uint64_t>(size)};
    World world(size);
    learn_to_read(world, random);
    size_t turn = 0;
    for (const int operation : collectives) {
        if (operation == barrier) {
            continue;
        }
        Job job;
        job.operation = operation;
        job.root = is_rooted(operation) ? static_cast<int>(turn) % size : -1;
        choose_kind(job, ++turn);
        const size_t parts = is_cut(operation) ? static_cast<size_t>(size) : 1;
        job.count = ((size_t{12} << 20) + 1000 * turn) / parts / job.item();
        if (operation == all_to_all_v) {
            vary_counts(job, static_cast<size_t>(size), random);
        }
        std::vector<Job> jobs;
        jobs.push_back(prepared(std::move(job), size, random));
        world.run([&](Group &group) { do_all(jobs, group); });
    }
    learned_alike(world);
    if (size > 2) {
        return;  // takes long with sanitizers
    }
    Job job;
    job.operation = all_reduce, job.dtype = float32, job.count = size_t{14} << 20;
    std::vector<Job> jobs;
    jobs.push_back(prepared(std::move(job), size, random));
    world.run([&](Group &group) { do_all(jobs, group); });
    bool is_there = false;
    for (const Tuner::Known &one : learned_alike(world)) {
        if (one.operation == all_reduce && one.least_bytes == size_t{32} << 20) {
            is_there = true;
            for (const auto &[method, ns] : one.typical_ns) {
                CHECK(ns > 0, method.name() << " was not tried in a call of 56 MiB");
            }
        }
    }
    CHECK(is_there, "nothing was learned of a call of 56 MiB");
}

// Chunks go round the near ring, and small operations before and after them as well.
void near_and_small_operations(int size) {
    Random random{options.seed + static_cast<uint64_t>(size)};
    World world(size);
    for (int rank = 0; rank < size; ++rank) {
        world[rank].tuner().fix(cached, shm::RingSize::near);
    }
    learn_to_read(world, random);
    const size_t small = small_bytes(world[0]);
    std::vector<Job> jobs;
    for (int turn = 0; turn < 60; ++turn) {
        Job job;
        const bool is_large = turn % 3 != 2;
        job.operation =
            is_large ? (turn % 2 == 0 ? broadcast : shm::reduce) : (turn % 2 == 0 ? all_gather : all_reduce);
        job.root = is_large ? static_cast<int>(random.below(static_cast<size_t>(size))) : -1;
        const size_t bytes = is_large ? small + random.below(8 * small) : slot_bytes + random.below(small / 4);
        job.count = bytes / job.item();
        jobs.push_back(prepared(std::move(job), size, random));
    }
    Job last;
    last.operation = broadcast, last.root = size - 1, last.count = 4 * small / last.item();
    jobs.push_back(prepared(std::move(last), size, random));
    world.run([&](Group &group) { do_all(jobs, group); });
    for (int rank = 0; rank < size; ++rank) {
        CHECK(world[rank].method().ring == shm::RingSize::near, "rank " << rank << ": " << world[rank].method().name());
    }
}

// Every dtype with everything it can be reduced with, in small operations and in chunks.
void every_kind(int size) {
    Random random{options.seed};
    World world(size);
    std::vector<Job> jobs;
    for (int dtype = 0; dtype < dtypes; ++dtype) {
        for (int op = 0; op < ops; ++op) {
            for (const int operation : {all_reduce, shm::reduce, reduce_scatter}) {
                for (const size_t count : {size_t{37}, size_t{33000} / static_cast<size_t>(size)}) {
                    if (reduces(dtype, op)) {
                        Job job;
                        job.operation = operation, job.dtype = dtype, job.op = op, job.count = count;
                        job.root = operation == shm::reduce ? op % size : -1;
                        jobs.push_back(prepared(std::move(job), size, random));
                    }
                }
            }
        }
    }
    world.run([&](Group &group) { do_all(jobs, group); });
}

}  // namespace

TEST(cached_operations_of_2) { every_operation(2, cached); }
TEST(wide_operations_of_2) { every_operation(2, cached, {}, shm::RingSize::wide); }
TEST(wide_operations_of_3) { every_operation(3, cached, {}, shm::RingSize::wide); }
TEST(wide_operations_of_5) { every_operation(5, cached, {}, shm::RingSize::wide); }
TEST(near_operations_of_2) { every_operation(2, cached, {}, shm::RingSize::near); }
TEST(near_operations_of_3) { every_operation(3, cached, {}, shm::RingSize::near); }
TEST(near_and_small_operations_of_2) { near_and_small_operations(2); }
TEST(near_and_small_operations_of_3) { near_and_small_operations(3); }
TEST(near_and_small_operations_of_9) { near_and_small_operations(9); }
TEST(streamed_operations_of_2) { every_operation(2, streamed); }
TEST(single_copies_of_2) { every_operation(2, single_copy); }
TEST(cached_operations_of_3) { every_operation(3, cached); }
TEST(streamed_operations_of_3) { every_operation(3, streamed); }
TEST(single_copies_of_3) { every_operation(3, single_copy); }
TEST(operations_of_1) { every_operation(1, cached); }
TEST(operations_of_4) { every_operation(4, single_copy); }
TEST(operations_of_8) { every_operation(8, single_copy); }
TEST(operations_of_64) { every_operation(64, streamed); }
TEST(cached_operations_in_any_order) { every_operation(5, cached, shuffled_orders(5)); }
TEST(single_copies_in_any_order) { every_operation(4, single_copy, shuffled_orders(4)); }
TEST(exchanges_of_2) { exchanges_of_any_size(2, false); }
TEST(exchanges_of_changing_sizes_of_2) { exchanges_of_any_size(2, true); }
TEST(exchanges_of_changing_sizes_of_3) { exchanges_of_any_size(3, true); }
TEST(calls_in_segments_of_2) { calls_in_segments(2); }
TEST(calls_in_segments_of_3) { calls_in_segments(3); }
TEST(kinds_of_3) { every_kind(3); }
TEST(kinds_of_5) { every_kind(5); }

// Cancellation and rounding differ with every other order of summation.
TEST(sums_do_not_depend_on_splits) {
    for (const int size : {2, 3, 4, 7}) {
        World world(size, size >= 4 ? shuffled_orders(size) : std::vector<std::vector<int>>{});
        for (const size_t count : {size_t{50}, size_t{9000}, size_t{150000}}) {
            for (const int dtype : {float32, bfloat16, float16}) {
                std::vector<Bytes> inputs;
                std::vector<const void *> pointers;
                Random random{options.seed + count};
                const size_t item = item_bytes(dtype);
                for (int rank = 0; rank < size; ++rank) {
                    inputs.emplace_back(count * item);
                    fill(inputs.back().data(), dtype, count, random, true);
                }
                for (const Bytes &input : inputs) {
                    pointers.push_back(input.data());
                }
                Bytes expected(count * item);
                tests::reduce(dtype, sum, expected.data(), pointers, count);
                const size_t cuts[] = {0, 1 + random.below(count - 1), count};
                world.run([&](Group &group) {
                    for (const size_t offset : {0, 1, 5}) {
                        const size_t skipped = offset * static_cast<size_t>(group.rank() + 1) * item;
                        for (const bool split : {false, true}) {
                            Bytes tensor(skipped + count * item);
                            char *begin = tensor.data() + skipped;
                            std::memcpy(begin, inputs[static_cast<size_t>(group.rank())].data(), count * item);
                            for (int part = 0; part < (split ? 2 : 1); ++part) {
                                const size_t from = cuts[part], until = split ? cuts[part + 1] : count;
                                Request request;
                                request.operation = all_reduce;
                                request.dtype = static_cast<uint8_t>(dtype);
                                request.input = request.output = begin + from * item;
                                request.count = until - from;
                                const Handle task = group.start(request, false);
                                CHECK(group.wait(*task, options.patience) == complete, group.failure());
                            }
                            const size_t at = difference(dtype, begin, expected.data(), count);
                            CHECK(at == count, "rank " << group.rank() << " of " << size << ", dtype " << dtype << ", "
                                                       << count << " elements cut at " << cuts[1] << ", offset "
                                                       << offset << (split ? ", split: " : ": ") << at << " is "
                                                       << shown(dtype, begin, at) << ", not "
                                                       << shown(dtype, expected.data(), at));
                        }
                    }
                });
            }
        }
    }
}

// Nothing to do is something to do together, also where a tensor without elements has no address.
TEST(operations_on_nothing) {
    Random random{options.seed};
    for (const int size : {1, 2, 5}) {
        World world(size);
        std::vector<Job> jobs;
        for (const int operation : collectives) {
            Job job;
            job.operation = operation;
            job.root = is_rooted(operation) ? size - 1 : -1;
            job.counts.assign(static_cast<size_t>(size), std::vector<size_t>(static_cast<size_t>(size)));
            jobs.push_back(prepared(std::move(job), size, random));
        }
        if (size > 1) {
            Job job;
            job.operation = send, job.from = 0, job.root = 1;
            jobs.push_back(prepared(std::move(job), size, random));
        }
        world.run([&](Group &group) { do_all(jobs, group); });
    }
}

// The first rank whose memory cannot be read is the one that the error names.
TEST(peers_are_read_in_order) {
    if (!can_read_memory()) {
        return;
    }
    const std::vector<int> order{2, 3, 1};
    const Bytes theirs(8, 1);
    Bytes input(8), output(32);
    for (size_t readable = 0; readable < order.size(); ++readable) {
        Segment segment(4);
        const auto group = segment.join(0, order);
        CHECK(group->reading_order() == order, "another order");
        for (size_t one = 0; one < readable; ++one) {
            group->record_of(order[one], 1).input_address = reinterpret_cast<uint64_t>(theirs.data());
        }
        Request request;
        request.operation = all_gather, request.count = 8;
        request.input = input.data(), request.output = output.data();
        SingleCopy::act(*group, Operands(*group, request), Range{0, 8}, 1, 1);
        const std::string expected = "rank " + std::to_string(order[readable]);
        CHECK(group->failure().find(expected) != std::string::npos, group->failure() << " without " << expected);
    }
}

// Each rank finds out for itself whether ranks share cores, and may find something else than others.
TEST(ranks_cut_alike_whoever_is_oversubscribed) {
    const std::vector<std::vector<bool>> found{
        {true, false, false}, {false, true, true}, {true, true, true}, {false, false, false}};
    for (const std::vector<bool> &oversubscribed : found) {
        Random random{options.seed};
        World world(3, {}, oversubscribed);
        std::vector<Job> jobs;
        for (const int operation : {all_reduce, reduce_scatter, all_gather, broadcast, all_to_all}) {
            Job job;
            job.operation = operation;
            job.root = operation == broadcast ? 1 : -1;
            job.count = (world[0].layout().ring_bytes() + 1000) / job.item();
            jobs.push_back(prepared(std::move(job), 3, random));
        }
        world.run([&](Group &group) { do_all(jobs, group); });
    }
}

TEST(a_fixed_transfer_is_the_first_candidate_that_has_it) {
    Random random{options.seed};
    World world(2);
    for (int rank = 0; rank < 2; ++rank) {
        world[rank].tuner().fix(cached);
    }
    for (const auto &[operation, expected] : {std::pair<int, std::string>{all_reduce, "cached, by all"},
                                              {broadcast, "cached, small chunks"},
                                              {all_gather, "cached"}}) {
        Job job;
        job.operation = operation, job.root = operation == broadcast ? 0 : -1, job.count = 100000;
        std::vector<Job> jobs;
        jobs.push_back(prepared(std::move(job), 2, random));
        world.run([&](Group &group) { do_all(jobs, group); });
        CHECK(world[0].method().name() == expected, world[0].method().name() << " instead of " << expected);
    }
}

// Calls back to back do not show what it costs a program, so a small lead there is none.
TEST(the_wide_ring_has_to_be_faster_by_a_fifth) {
    for (const auto &[wide_ns, expected] :
         {std::pair<uint64_t, std::string>{85000, "cached"}, {75000, "cached, wide ring"}}) {
        Random random{options.seed};
        World world(2);
        learn_to_read(world, random);
        std::vector<Tuner::Prior> priors;
        const shm::Methods methods = shm::methods_for(all_reduce, 2, float32, true, world[0].tuner().can_read_peers());
        for (int one = 0; one < methods.count; ++one) {
            const shm::Method &method = methods.all[static_cast<size_t>(one)];
            const uint64_t others_ns = method.name() == "cached" ? 100000 : 300000;
            priors.push_back({all_reduce, size_t{32} << 10, false, true, method.name(),
                              method.ring == shm::RingSize::wide ? wide_ns : others_ns});
        }
        Job job;
        job.operation = all_reduce, job.dtype = float32, job.count = size_t{8} << 10;
        std::vector<Job> jobs;
        jobs.push_back(prepared(std::move(job), 2, random));
        world.run([&](Group &group) {
            group.start_from(priors);
            do_all(jobs, group);
        });
        const std::vector<Tuner::Known> learned = learned_alike(world);
        CHECK(learned.size() == 1 && learned[0].best.name() == expected, "with " << wide_ns << " ns of 100,000");
        for (const auto &[method, ns] : learned[0].typical_ns) {
            CHECK(method.ring != shm::RingSize::wide || ns == wide_ns, "the wide ring is known for " << ns << " ns");
        }
    }
}

// Ranks whose segments would be moved differently find out before they move them.
TEST(segments_moved_differently_are_an_error) {
    Segment segment(2);
    const auto group = segment.join(0, {1}), other = segment.join(1, {0});
    Request request;
    request.operation = all_reduce, request.dtype = float32, request.count = 1000;
    shm::Call call;
    group->begin(request, call, 1);
    shm::Record &theirs = group->record_of(1, 1);
    theirs.call = call;
    group->go_on(5, 2);
    theirs.call.of_segments[1] = 2;
    CHECK(group->goes_on_alike(1, 1, 5), "they are alike, but: " << group->failure());
    theirs.call.of_segments[1] = 3;
    CHECK(!group->goes_on_alike(1, 1, 5), "they differ");
    CHECK(group->failure().find("different transfers") != std::string::npos, group->failure());
}

// Of ranks that the scheduler has put on one core, none waits there until it falls asleep. An operation takes a turn of
// each, and every sleep is a switch that a thread asked for.
TEST(ranks_on_one_core_take_turns) {
    constexpr int operations = 1000;
    World world(2);
    const auto core = static_cast<size_t>(std::max(0, sched_getcpu()));
    std::array<long, 2> sleeps{};
    on_ranks(2, [&](int rank) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(core, &one);
        CHECK(sched_setaffinity(0, sizeof(one), &one) == 0, "rank " << rank << " cannot be bound to core " << core);
        rusage before{}, after{};
        getrusage(RUSAGE_THREAD, &before);
        for (int number = 0; number < operations; ++number) {
            Request request;
            request.operation = barrier;
            Group &group = world[rank];
            const Handle task = group.run(std::move(request), group.spins());
            const int state = task ? group.wait(*task, options.patience) : static_cast<int>(complete);
            CHECK(state == complete, "rank " << rank << ", operation " << number << ": " << group.failure());
        }
        getrusage(RUSAGE_THREAD, &after);
        sleeps[static_cast<size_t>(rank)] = after.ru_nvcsw - before.ru_nvcsw;
    });
    CHECK(sleeps[0] + sleeps[1] < operations / 4,
          "ranks fell asleep " << sleeps[0] << " and " << sleeps[1] << " times");
}

TEST(orders_that_leave_ranks_out_are_refused) {
    const Segment segment(3);
    for (const std::vector<int> &order : {std::vector<int>{1}, {1, 1}, {0, 1}, {1, 3}, {-1, 2}, {1, 2, 1}}) {
        try {
            segment.join(0, order);
        } catch (const std::invalid_argument &) {
            continue;
        }
        CHECK(false, "an order of " << order.size() << " ranks was accepted");
    }
    CHECK(segment.join(2)->reading_order() == (std::vector<int>{0, 1}), "not those after rank 2");
}
