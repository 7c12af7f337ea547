// Tensors that ranks can map, which operations read and write without a copy in between.

#include "segment/arena.hpp"
#include "ranks.hpp"
#include "segment/memory.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

using namespace tests;
using namespace shm;

namespace {

// As of Linux before 6.11, which a timer interrupts in each call that reserves more.
std::atomic<size_t> interrupted_above{SIZE_MAX};

}  // namespace

// In the place of the one in the library of C.
extern "C" int fallocate(int descriptor, int mode, off_t offset, off_t bytes) {
    if (mode == 0 && static_cast<size_t>(bytes) > interrupted_above) {
        errno = EINTR;
        return -1;
    }
    return static_cast<int>(syscall(SYS_fallocate, descriptor, mode, offset, bytes));
}

namespace {

// What the system counts as this process's.
size_t held_bytes() {
    const auto found = Arena::instance().statistics();
    return found.used_bytes + found.free_bytes + found.retired_bytes;
}

struct Allocated {
    explicit Allocated(size_t bytes) : begin(static_cast<char *>(Arena::instance().allocate(bytes))) {}
    ~Allocated() { Arena::instance().free(begin); }
    Allocated(const Allocated &) = delete;
    char *const begin;
};

// The tensors of a rank in the arena, or where `outside`, elsewhere; the results have to be the same.
void compare(const Job &job, Group &group, size_t offset, bool in_place, bool outside) {
    const auto me = static_cast<size_t>(group.rank());
    const Bytes &input = job.inputs[me], &expected = job.expected_of(group.rank());
    const size_t skipped = offset * job.item(), room = skipped + std::max(input.size(), expected.size());
    const Allocated from(room), to(room);
    Bytes private_from(room);
    char *begin = (outside ? private_from.data() : from.begin) + skipped;
    std::copy(input.begin(), input.end(), begin);
    Request request;
    request.operation = static_cast<uint8_t>(job.operation);
    request.dtype = static_cast<uint8_t>(job.dtype);
    request.op = static_cast<uint8_t>(job.op);
    request.root = job.root;
    request.count = job.count;
    request.input = begin;
    request.output = in_place ? begin : to.begin + skipped;
    const Handle task = group.start(request, false);
    CHECK(group.wait(*task, options.patience) == complete, described(job) << ": " << group.failure());
    const char *found = static_cast<const char *>(request.output);
    const size_t count = expected.size() / job.item(), at = difference(job.dtype, found, expected.data(), count);
    CHECK(at == count, "rank " << me << " of " << group.size() << ": " << at << " is " << shown(job.dtype, found, at)
                               << ", not " << shown(job.dtype, expected.data(), at) << "; " << described(job)
                               << (in_place ? ", in place" : "") << (outside ? ", one rank outside" : ""));
    CHECK(in_place || std::equal(input.begin(), input.end(), begin), "the input changed: " << described(job));
}

std::vector<Job> jobs_for(int size, Random &random) {
    std::vector<Job> jobs;
    size_t turn = 0;
    for (const int operation : {all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, gather}) {
        for (const size_t count : {size_t{10}, size_t{20001}, size_t{300007} / static_cast<size_t>(size)}) {
            Job job;
            job.operation = operation;
            job.root = operation == broadcast || operation == gather ? size - 1 : -1;
            choose_kind(job, ++turn);
            job.count = count;
            jobs.push_back(prepared(std::move(job), size, random));
        }
    }
    return jobs;
}

}  // namespace

TEST(tensors_in_shared_memory) {
    for (const int size : {1, 2, 3, 4}) {
        Random random{options.seed};
        World world(size);
        const std::vector<Job> jobs = jobs_for(size, random);
        world.run([&](Group &group) {
            for (const Job &job : jobs) {
                for (const bool outside : {false, true}) {
                    const bool in_place = job.operation == all_reduce || job.operation == broadcast;
                    // Broadcasts and the others that are direct go by what all ranks, or the root, have.
                    compare(job, group, static_cast<size_t>(group.rank()), in_place,
                            outside && group.rank() == (job.root < 0 ? 0 : job.root));
                }
            }
        });
    }
}

// An all_reduce out of place leaves its input, and writes its output, wherever they are.
TEST(tensors_in_shared_memory_out_of_place) {
    Random random{options.seed};
    for (const int size : {1, 2, 3}) {
        World world(size);
        Job job;
        job.operation = all_reduce;
        job.count = 50000;
        const Job whole = prepared(std::move(job), size, random);
        world.run([&](Group &group) {
            // Also where only one rank has two tensors.
            for (const bool all : {true, false}) {
                compare(whole, group, 1, !all && group.rank() > 0, false);
            }
        });
    }
}

TEST(gathers_in_shared_memory_in_place) {
    Random random{options.seed};
    for (const int size : {2, 3}) {
        World world(size);
        Job job;
        job.operation = all_gather;
        job.count = 50000;
        const Job whole = prepared(std::move(job), size, random);
        world.run([&](Group &group) {
            const auto me = static_cast<size_t>(group.rank());
            const Bytes &input = whole.inputs[me];
            const Allocated all(input.size() * static_cast<size_t>(size));
            Request request;
            request.operation = all_gather;
            request.dtype = float32;
            request.count = whole.count;
            request.input = all.begin + me * input.size();
            request.output = all.begin;
            std::memcpy(all.begin + me * input.size(), input.data(), input.size());
            const Handle task = group.start(request, false);
            CHECK(group.wait(*task, options.patience) == complete, group.failure());
            CHECK(std::memcmp(all.begin, whole.expected[0].data(), whole.expected[0].size()) == 0, "rank " << me);
        });
    }
}

// More than the caches hold, which is copied past them.
TEST(large_tensors_in_shared_memory) {
    Random random{options.seed};
    World world(2);
    for (const int operation : {broadcast, all_gather}) {
        Job job;
        job.operation = operation;
        job.dtype = float64;
        job.root = operation == broadcast ? 1 : -1;
        job.count = (size_t{4} << 20) + 3;
        const Job whole = prepared(std::move(job), 2, random);
        world.run([&](Group &group) { compare(whole, group, 1, operation == broadcast, false); });
    }
    Arena::instance().trim();
}

TEST(arena_keeps_and_gives_back) {
    Arena &arena = Arena::instance();
    arena.trim();
    CHECK(held_bytes() == 0, held_bytes());
    char *first = static_cast<char *>(arena.allocate(100000));
    CHECK(held_bytes() >= 100000 && reinterpret_cast<uintptr_t>(first) % 4096 == 0, held_bytes());
    const Place found = arena.find(first, 100000);
    CHECK(found.inode != 0 && arena.find(first + 5, 99995).offset == found.offset + 5, "not found");
    CHECK(arena.find(first, 200000).inode == 0 && arena.find(first - 1, 1).inode == 0, "found beside it");
    CHECK(arena.find(nullptr, 0).inode == 0 && arena.find(&arena, 1).inode == 0, "found elsewhere");
    arena.free(first);
    CHECK(arena.allocate(99000) == first, "freed memory is not used again");
    arena.trim();
    CHECK(held_bytes() > 0, "memory in use was given back");
    arena.free(first);
    arena.trim();
    CHECK(held_bytes() == 0, held_bytes());
    void *none = arena.allocate(0);
    CHECK(none != nullptr, "no address");
    arena.free(none);
    arena.trim();
}

// What is free is found again, in any order of allocations, and no two tensors overlap.
TEST(arena_among_many_tensors) {
    Random random{options.seed};
    Arena &arena = Arena::instance();
    const size_t before = held_bytes();
    struct Held {
        char *begin;
        size_t bytes;
        char value;
    };
    std::vector<Held> held;
    for (int turn = 0; turn < 3000; ++turn) {
        if (held.size() < 20 || (held.size() < 200 && random.below(2) == 0)) {
            const size_t bytes = 1 + random.below(random.below(10) == 0 ? 2000000 : 20000);
            held.push_back({static_cast<char *>(arena.allocate(bytes)), bytes, static_cast<char>(turn)});
            std::memset(held.back().begin, held.back().value, bytes);
        } else {
            std::swap(held[random.below(held.size())], held.back());
            const Held one = held.back();
            held.pop_back();
            CHECK(std::all_of(one.begin, one.begin + one.bytes, [&](char byte) { return byte == one.value; }), turn);
            arena.free(one.begin);
        }
        if (random.below(100) == 0) {
            arena.trim();
            CHECK(arena.statistics().free_bytes == 0, arena.statistics().free_bytes);
        }
    }
    for (const Held &one : held) {
        arena.free(one.begin);
    }
    arena.trim();
    CHECK(held_bytes() == before, held_bytes());
}

TEST(arena_used_by_many_threads) {
    on_ranks(4, [](int rank) {
        Random random{options.seed + static_cast<uint64_t>(rank)};
        for (int turn = 0; turn < 100; ++turn) {
            const size_t bytes = 1 + random.below(50000);
            const Allocated one(bytes);
            std::memset(one.begin, rank, bytes);
            std::this_thread::yield();
            CHECK(std::all_of(one.begin, one.begin + bytes, [&](char byte) { return byte == rank; }), "shared");
            CHECK(Arena::instance().find(one.begin, bytes).inode != 0, "not found");
            Arena::instance().trim();
        }
    });
    Arena::instance().trim();
    CHECK(held_bytes() == 0, held_bytes());
}

// As between processes: the descriptor of one, opened through /proc, mapped and reserved by each.
TEST(mappings_of_their_own) {
    Random random{options.seed};
    const int descriptor = create_memory(Layout(3).end);
    std::vector<Job> jobs;
    for (const int operation : {all_reduce, all_to_all, gather, send}) {
        for (const size_t count : {10, 30000}) {
            Job job;
            job.operation = operation, job.count = count;
            job.root = operation == gather || operation == send ? 1 : -1, job.from = operation == send ? 2 : -1;
            jobs.push_back(prepared(std::move(job), 3, random));
        }
    }
    on_ranks(3, [&](int rank) {
        const int mine = open_memory(getpid(), descriptor, inode_of(descriptor), 0);
        Group group(map_memory(mine, Layout(3).end), mine, 3, rank, std::vector<int>(3, getpid()), true, true);
        do_all(jobs, group);
    });
    close_memory(descriptor);
    bool thrown = false;
    try {
        open_memory(getpid(), descriptor + 1000, 0, 0);
    } catch (const Inaccessible &) {
        thrown = true;
    }
    CHECK(thrown, "opened what is not there");
}

// A program may close its standard streams, and what it prints later is not to reach the memory.
TEST(memory_does_not_take_the_place_of_a_standard_stream) {
    const int kept = dup(STDIN_FILENO);
    close(STDIN_FILENO);
    const int descriptor = create_memory(100);
    const int mine = open_memory(getpid(), descriptor, inode_of(descriptor), 100);
    const bool is_closed = fcntl(STDIN_FILENO, F_GETFD) == -1;
    const bool is_inherited = (fcntl(descriptor, F_GETFD) & fcntl(mine, F_GETFD) & FD_CLOEXEC) == 0;
    if (kept >= 0) {
        dup2(kept, STDIN_FILENO);
        close(kept);
    }
    CHECK(descriptor > STDERR_FILENO && mine > STDERR_FILENO, descriptor << " and " << mine);
    CHECK(is_closed && !is_inherited, is_closed << " and " << is_inherited);
    close_memory(mine);
    close_memory(descriptor);
}

TEST(a_file_without_seals_is_refused) {
    const int other = open("/dev/null", O_RDWR);
    bool thrown = false;
    try {
        close_memory(open_memory(getpid(), other, inode_of(other), 0));
    } catch (const Inaccessible &) {
        thrown = true;
    }
    close_memory(other);
    CHECK(thrown, "others could cut it");
}

// On systems with pages of 64 KiB, others cannot be given up in part.
TEST(tensors_share_no_page) {
    constexpr size_t page = size_t{64} << 10;
    Arena arena(page);
    const auto *first = static_cast<char *>(arena.allocate(100)), *next = static_cast<char *>(arena.allocate(page + 1));
    CHECK(next - first == page, next - first);
    CHECK(arena.statistics().used_bytes == 3 * page, arena.statistics().used_bytes);
    arena.free(const_cast<char *>(first));
    arena.free(const_cast<char *>(next));
    arena.trim();
    CHECK(arena.statistics().free_bytes == 0, arena.statistics().free_bytes);
}

TEST(pages_are_given_up_as_a_whole) {
    const size_t page = page_bytes();
    const int descriptor = create_memory(4 * page);
    char *const begin = static_cast<char *>(map_memory(descriptor, 4 * page));
    int ends[2];
    CHECK(pipe(ends) == 0, "no pipe");
    // Writing what is not there is an error, where a load would be a signal.
    const auto is_there = [&](size_t at) { return write(ends[1], begin + at * page, 1) == 1; };
    drop_pages(begin + page, page + 1);
    CHECK(is_there(0) && !is_there(1) && is_there(2), is_there(0) << is_there(1) << is_there(2));
    drop_pages(begin + 2 * page + 1, 2 * page - 1);
    CHECK(is_there(2) && !is_there(3), is_there(2) << is_there(3));
    close(ends[0]);
    close(ends[1]);
    unmap_memory(begin, 4 * page);
    close_memory(descriptor);
}

TEST(memory_is_reserved_while_signals_come) {
    constexpr size_t bytes = size_t{3} << 20;
    const int descriptor = create_memory(bytes);
    interrupted_above = size_t{100} << 10;
    reserve_memory(descriptor, 0, bytes, "a test");
    interrupted_above = SIZE_MAX;
    struct stat found{};
    CHECK(fstat(descriptor, &found) == 0 && static_cast<size_t>(found.st_blocks) * 512 == bytes, found.st_blocks);
    close_memory(descriptor);
}

TEST(memory_of_what_failed_is_not_used_again) {
    for (const bool closes : {false, true}) {
        World world(2);
        const size_t bytes = size_t{1} << 20, retired = Arena::instance().statistics().retired_bytes;
        void *const begin = Arena::instance().allocate(bytes);
        Request request;
        request.operation = all_reduce;
        request.dtype = float32;
        request.count = bytes / sizeof(float);
        request.input = request.output = begin;
        const Handle task = world[0].start(std::move(request), false);
        closes ? world[0].close() : world[0].time_out();
        CHECK(world[0].wait(*task, options.patience) == failed, task->now());
        CHECK(Arena::instance().statistics().retired_bytes == retired + bytes, "a peer may yet write to it");
        Arena::instance().free(begin);
        CHECK(Arena::instance().statistics().retired_bytes == retired, "nothing is left of it");
        void *const next = Arena::instance().allocate(bytes);
        CHECK(next != begin, "its place is taken");
        Arena::instance().free(next);
    }
}

// What a peer writes after this rank has given up does not reach the tensor, which keeps its content.
TEST(late_ranks_do_not_change_a_tensor) {
    constexpr size_t skipped = 100, bytes = size_t{3} << 20, rest = 5000;
    for (const bool is_whole : {true, false}) {
        World world(2);
        Arena &arena = Arena::instance();
        const Allocated tensor(is_whole ? bytes - skipped : skipped + bytes + rest);
        char *const begin = is_whole ? tensor.begin : tensor.begin + skipped;
        const size_t written = is_whole ? bytes - skipped : bytes;
        const Place place = arena.find(tensor.begin, 1);
        const int file = open_memory(getpid(), place.descriptor, place.inode, 0);
        const size_t file_bytes = size_of(file);
        char *const peers = static_cast<char *>(map_memory(file, file_bytes)) + place.offset;
        std::memset(begin, 1, written);
        tensor.begin[0] = begin[written - 1] = 2;
        Request request;
        request.operation = all_reduce;
        request.dtype = uint8;
        request.count = written;
        request.input = request.output = begin;
        const Handle task = world[0].start(std::move(request), false);
        world[0].time_out();
        CHECK(world[0].wait(*task, options.patience) == failed, task->now());
        CHECK(arena.find(begin, written).inode == 0, "peers would not see it");
        // Pages that hold something else as well are still shared.
        const size_t page = Layout::page(1), head = is_whole ? 0 : page - skipped;
        const size_t tail = is_whole ? 0 : (skipped + written) % page;
        std::memset(peers + (begin - tensor.begin) + head, 3, written - head - tail);
        CHECK(std::all_of(begin + 1, begin + written - 1, [](char byte) { return byte == 1; }), "changed");
        CHECK(tensor.begin[0] == 2 && begin[written - 1] == 2, "lost");
        if (!is_whole) {
            peers[skipped + written + page] = 4;
            CHECK(tensor.begin[skipped + written + page] == 4, "another operation's part is not shared any more");
        }
        unmap_memory(peers - place.offset, file_bytes);
        close_memory(file);
    }
    Arena::instance().trim();
}

TEST(a_rank_stops_writing_to_those_that_gave_up) {
    constexpr size_t bytes = size_t{64} << 20;
    World world(2);
    const Allocated first(bytes), second(bytes);
    std::memset(first.begin, 1, bytes);
    std::memset(second.begin, 1, bytes);
    const auto request_for = [&](const Allocated &tensor) {
        Request request;
        request.operation = all_reduce;
        request.dtype = uint8;
        request.count = bytes;
        request.input = request.output = tensor.begin;
        return request;
    };
    const Handle task = world[0].start(request_for(first), false);
    std::thread late([&] {
        const Handle its = world[1].start(request_for(second), false);
        CHECK(world[1].wait(*its, options.patience) == failed, its->now());
    });
    // The first byte that the other rank reduces.
    const volatile char *const seen = first.begin + bytes / 2;
    while (*seen == 1) {
        std::this_thread::yield();
    }
    world[0].time_out();
    CHECK(world[0].wait(*task, options.patience) == failed, task->now());
    std::memset(first.begin, 5, bytes);
    late.join();
    CHECK(std::all_of(first.begin, first.begin + bytes, [](char byte) { return byte == 5; }), "changed");
}

// While a thread reserves memory, which takes long, others free and find theirs.
TEST(arena_is_open_while_memory_is_reserved) {
    constexpr size_t bytes = size_t{512} << 20;
    Arena &arena = Arena::instance();
    arena.trim();
    const Allocated mine(5000);
    const int file = arena.find(mine.begin, 1).descriptor;
    const auto filled = [&] {
        struct stat found{};
        CHECK(fstat(file, &found) == 0, "no file");
        return static_cast<size_t>(found.st_blocks) * 512;
    };
    bool was_open = false;
    // A busy machine may run this thread only when the other is done.
    for (int turn = 0; turn < 50 && !was_open; ++turn) {
        void *other = arena.allocate(100);
        const size_t before = filled();
        std::atomic<void *> large{nullptr};
        std::thread reserves([&] { large.store(arena.allocate(bytes)); });
        while (filled() == before) {
            std::this_thread::yield();
        }
        arena.free(other);
        CHECK(arena.find(mine.begin, 5000).inode != 0, "not found");
        was_open = filled() < before + bytes;
        reserves.join();
        arena.free(large.load());
        arena.trim();
    }
    CHECK(was_open, "freeing a tensor waits for the end of the reservation");
}
