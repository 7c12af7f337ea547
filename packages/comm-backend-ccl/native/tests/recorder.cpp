// The flight recorder: what a rank called is in the file, whatever becomes of the call and of the rank.

#include "recorder/recorder.hpp"

#include "ranks.hpp"
#include "segment/memory.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <thread>
#include <vector>

using namespace tests;
using namespace shm;
using flight::Clock;
using flight::Facts;
using flight::Recorded;

namespace {

// A record as a reader copies it.
struct Seen {
    uint64_t number, began, ended, kind, elements, call, digest, root_and_tag;

    bool is_open() const { return (ended & ~flight::in_background) == 0; }
    bool is_awaited() const { return ended == 0; }
    bool has_failed() const { return (ended & flight::failed_bit) != 0; }
    uint64_t code(int at, int bits) const { return kind >> at & ((uint64_t{1} << bits) - 1); }
    uint64_t operation() const { return code(flight::operation_at, flight::operation_bits); }
    bool is_asynchronous() const { return code(flight::asynchronous_at, flight::asynchronous_bits) != 0; }
};

// A file as Python makes it, and how it is read.
class Ring {
public:
    explicit Ring(uint64_t records, bool is_recorded_to = true)
        : records_(records), bytes_(flight::needed_bytes(records)), descriptor_(create_memory(bytes_)),
          begin_(static_cast<char *>(map_memory(descriptor_, bytes_))), is_recorded_to_(is_recorded_to) {
        auto *header = reinterpret_cast<flight::Header *>(begin_);
        header->records = records;
        std::memcpy(header->magic, flight::magic, sizeof(header->magic));
        if (is_recorded_to_) {
            flight::record_to(descriptor_);
        }
    }
    ~Ring() {
        if (is_recorded_to_) {
            flight::record_to(-1);
        }
        unmap_memory(begin_, bytes_);
        close_memory(descriptor_);
    }
    Ring(const Ring &) = delete;

    int descriptor() const { return descriptor_; }
    const Clock &clock() const { return *reinterpret_cast<const Clock *>(begin_ + flight::clock_offset); }
    uint64_t count() const { return clock().count.load(); }
    // Whether record `number` is there, and nobody changed it while it was read.
    bool read(uint64_t number, Seen &seen) const {
        const flight::Record &one = reinterpret_cast<const flight::Record *>(
            begin_ + flight::header_bytes)[flight::own_lane * records_ + number % records_];
        seen = {one.number.load(),   one.began.load(), one.ended.load(),  one.kind.load(),
                one.elements.load(), one.call.load(),  one.digest.load(), one.root_and_tag.load()};
        return seen.number == number && one.number.load() == number;
    }
    Seen operator[](uint64_t number) const {
        Seen seen{};
        CHECK(read(number, seen), "record " << number << " of " << count() << ": found " << seen.number);
        return seen;
    }
    std::vector<Seen> all() const {
        std::vector<Seen> found;
        for (uint64_t number = 1; number <= count(); ++number) {
            found.push_back((*this)[number]);
        }
        return found;
    }

private:
    uint64_t records_;
    size_t bytes_;
    int descriptor_;
    char *begin_;
    bool is_recorded_to_;
};

Job job_of(int operation, size_t count, int root = -1) {
    Job job;
    job.operation = operation, job.count = count, job.root = root;
    return job;
}

Request meeting() {
    Request request;
    request.operation = barrier;
    return request;
}

// One whose words all follow from it.
Facts facts_of(uint64_t call) {
    return {static_cast<uint32_t>(call * 7),
            call * 11,
            call,
            static_cast<int>(call % 50),
            static_cast<int>(call % 99),
            false,
            static_cast<uint16_t>(call % 31)};
}

bool is_of(const Seen &seen, uint64_t call) {
    const Facts facts = facts_of(call);
    return seen.call == call && seen.kind == facts.kind && seen.elements == facts.elements &&
           seen.root_and_tag == (static_cast<uint64_t>(facts.root + 1) | static_cast<uint64_t>(facts.user_call) << 16 |
                                 static_cast<uint64_t>(facts.tag) << 32);
}

}  // namespace

TEST(calls_are_recorded) {
    for (const size_t count : {size_t{5}, size_t{3000}, size_t{200000}}) {
        const Ring ring(256);
        World world(2);
        world[0].record_as(3), world[1].record_as(3);
        Random random{options.seed};
        std::vector<Job> jobs;
        for (const int operation : {all_reduce, shm::reduce, broadcast, all_gather, reduce_scatter, all_to_all, gather,
                                    scatter, barrier, all_to_all_v}) {
            Job job = job_of(operation, operation == barrier || operation == all_to_all_v ? 0 : count,
                             is_rooted(operation) ? 1 : -1);
            if (operation == all_to_all_v) {
                job.counts = {{count, 2}, {2, 7}};
            }
            jobs.push_back(prepared(std::move(job), 2, random));
        }
        world.run([&](Group &group) { do_all(jobs, group); });
        CHECK(ring.count() == 2 * jobs.size(), ring.count());
        std::map<uint64_t, std::vector<Seen>> calls;
        for (const Seen &seen : ring.all()) {
            calls[seen.call].push_back(seen);
            CHECK(!seen.is_open() && !seen.has_failed() && seen.ended >= seen.began, "record " << seen.number);
            CHECK(seen.code(flight::group_at, flight::group_bits) == 3, seen.kind);
            CHECK((seen.kind >> flight::native_at & 1) == 1 && seen.kind >> 32 == 0, seen.kind);
        }
        for (size_t one = 0; one < jobs.size(); ++one) {
            const auto &both = calls[one + 1];
            CHECK(both.size() == 2, both.size() << " records of call " << one + 1);
            for (const Seen &seen : both) {
                CHECK(seen.operation() == static_cast<uint64_t>(jobs[one].operation), seen.operation());
                CHECK(seen.root_and_tag == static_cast<uint64_t>(jobs[one].root + 1), seen.root_and_tag);
                if (jobs[one].operation != all_to_all_v) {
                    CHECK(seen.elements == jobs[one].count, seen.elements);
                }
            }
        }
        const auto &uneven = calls[jobs.size()];
        const std::set<uint64_t> means{uneven[0].elements, uneven[1].elements};
        CHECK(means == (std::set<uint64_t>{4, count / 2 + 1}), *means.begin() << " and " << *means.rbegin());
    }
}

TEST(messages_are_recorded) {
    const Ring ring(64);
    World world(2);
    std::vector<float> sent(10, 1.0f), got(10);
    const auto message = [&](int operation, int peer, int tag) {
        Request request;
        request.operation = static_cast<uint8_t>(operation), request.dtype = float32;
        request.root = peer, request.tag = tag, request.count = 10;
        request.input = sent.data(), request.output = got.data();
        return request;
    };
    const Handle from_any = world[1].start(message(receive, any_source, 5), false);
    const Handle unmatched = world[1].start(message(receive, 0, 1 << 30), true);
    world[0].start(message(send, 1, 5), false);
    CHECK(world[1].wait(*from_any, options.patience) == complete, world[1].failure());
    const std::vector<Seen> found = ring.all();
    CHECK(found.size() == 3, found.size());
    for (const Seen &seen : found) {
        CHECK(seen.call == 0 && seen.elements == 10, seen.call);
    }
    CHECK(found[0].operation() == receive && found[0].root_and_tag == uint64_t{5} << 32, found[0].root_and_tag);
    CHECK(!found[0].is_open() && !found[0].is_asynchronous(), "the receive of any rank");
    CHECK(found[1].root_and_tag == (uint64_t{1} << 62 | 1) && found[1].is_asynchronous(), found[1].root_and_tag);
    CHECK(found[1].is_open() && !found[1].is_awaited() && unmatched->recorded.number() == 2,
          unmatched->recorded.number());
    CHECK(found[2].operation() == send && !found[2].is_open() && found[2].root_and_tag == (uint64_t{5} << 32 | 2),
          found[2].root_and_tag);
    // Messages are no calls of the group.
    world.run([&](Group &group) {
        if (const Handle task = group.run(meeting(), 1)) {
            CHECK(group.wait(*task, options.patience) == complete, group.failure());
        }
    });
    CHECK(ring[4].call == 1 && ring[5].call == 1, ring[4].call);
}

TEST(a_call_is_recorded_before_it_ends) {
    const Ring ring(64);
    World world(2);
    Random random{options.seed};
    const Job small = prepared(job_of(all_reduce, 3), 2, random),
              large = prepared(job_of(all_gather, 100000), 2, random);
    Part first(small, world[0]), second(large, world[0]), third(small, world[0]);
    for (Part *part : {&first, &second, &third}) {
        part->start(true);
    }
    for (uint64_t number = 1; number <= 3; ++number) {
        const Seen seen = ring[number];
        CHECK(seen.is_open() && seen.is_asynchronous() && seen.call == number, "record " << number);
        CHECK(!seen.is_awaited(), "record " << number);
    }
    second.await(5);
    CHECK(!ring[1].is_awaited() && ring[2].is_awaited() && ring[2].is_open(), ring[2].ended);
    second.await(6);
    CHECK(ring[2].kind >> flight::caller_at == 5 && ring[3].kind >> flight::caller_at == 0, ring[2].kind);
    const std::vector<Job> jobs{small, large, small};
    std::thread other([&] { do_all(jobs, world[1]); });
    for (Part *part : {&first, &second, &third}) {
        part->finish();
    }
    other.join();
    for (uint64_t number = 1; number <= 3; ++number) {
        CHECK(!ring[number].is_open() && !ring[number].has_failed(), "record " << number);
    }
    const uint64_t ended = ring[1].ended;
    first.await(7);
    CHECK(ring[1].ended == ended, "a call that has ended is not under way again");
}

TEST(failed_calls_are_recorded) {
    const Ring ring(64);
    World world(2);
    Random random{options.seed};
    const Job one = prepared(job_of(all_reduce, 3), 2, random), other = prepared(job_of(all_reduce, 4), 2, random);
    world.run([&](Group &group) {
        const Part part(group.rank() == 0 ? one : other, group);
        Handle task = group.run(Request(part.request()), 1);
        CHECK(task && group.wait(*task, options.patience) == failed, "rank " << group.rank());
        bool is_refused = false;
        try {
            group.run(meeting(), 1);
        } catch (const std::invalid_argument &) {
            is_refused = true;
        }
        CHECK(is_refused, "rank " << group.rank());
    });
    CHECK(ring.count() == 2, ring.count() << " records: nothing is recorded of what is refused");
    CHECK(ring[1].has_failed() && ring[2].has_failed(), ring[1].ended << " and " << ring[2].ended);

    // Of groups that are closed.
    for (const bool quietly : {false, true}) {
        World next(2);
        const Handle task = next[0].start(meeting(), false);
        next[0].close(quietly);
        CHECK(ring[task->recorded.number()].has_failed() == !quietly, "quietly: " << quietly);
        CHECK(ring[task->recorded.number()].is_open() == quietly, "quietly: " << quietly);
    }
}

TEST(records_of_several_threads) {
    constexpr uint64_t threads = 4, calls = 4000;
    const Ring ring(1 << 15);
    std::atomic<bool> over{false};
    std::thread reader([&] {
        uint64_t seen_so_far = 0;
        // Once more when all is written, as it may begin late.
        for (bool is_last = false; !is_last;) {
            is_last = over.load();
            Seen seen{};
            const uint64_t last = ring.count();
            for (uint64_t number = last > 20 ? last - 20 : 1; number <= last; ++number) {
                if (ring.read(number, seen)) {
                    CHECK(is_of(seen, seen.call), "record " << number << " is of several calls");
                    ++seen_so_far;
                }
            }
        }
        CHECK(seen_so_far > 0, "nothing was read");
    });
    on_ranks(threads, [&](int thread) {
        for (uint64_t call = 1; call <= calls; ++call) {
            const Recorded recorded = flight::begin(facts_of(call * threads + static_cast<uint64_t>(thread)));
            recorded.end(call % 3 == 0);
        }
    });
    std::set<uint64_t> found;
    for (const Seen &seen : ring.all()) {
        found.insert(seen.call);
        CHECK(is_of(seen, seen.call) && !seen.is_open(), "record " << seen.number);
        CHECK(seen.has_failed() == (seen.call / threads % 3 == 0), seen.call);
    }
    CHECK(found.size() == threads * calls, found.size());
    over = true;
    reader.join();
}

TEST(records_wrap_around) {
    const Ring ring(64);
    const Recorded first = flight::begin(facts_of(1));
    CHECK(first.number() == 1, first.number());
    for (uint64_t call = 2; call <= 1000; ++call) {
        flight::begin(facts_of(call));
    }
    const Recorded last = flight::begin(facts_of(1001));
    first.end(true), first.wait(1, false);  // whose place is another's
    last.end(false);
    CHECK(ring.count() == 1001, ring.count());
    Seen seen{};
    for (uint64_t number = 1; number <= 1001; ++number) {
        const bool is_kept = number + 64 > 1001;
        CHECK(ring.read(number, seen) == is_kept, number);
        if (is_kept) {
            CHECK(is_of(seen, number) && seen.is_open() == (number != 1001) && !seen.has_failed(), number);
        }
    }
}

TEST(recording_stops_while_calls_are_made) {
    const Ring first(1 << 12, false), second(1 << 10, false);
    World world(2);
    Random random{options.seed};
    const std::vector<Job> jobs{prepared(job_of(all_reduce, 5), 2, random),
                                prepared(job_of(all_gather, 9000), 2, random)};
    std::atomic<bool> over{false};
    std::thread changing([&] {
        const std::array<int, 4> turns{first.descriptor(), -1, second.descriptor(), -1};
        for (int turn = 0; turn < 200; ++turn) {
            flight::record_to(turns[static_cast<size_t>(turn % 4)]);
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
        over = true;
    });
    // What the first rank decides, the other reads between two calls of both.
    std::atomic<bool> is_last{false};
    world.run([&](Group &group) {
        while (!is_last.load()) {
            do_all(jobs, group);
            if (group.rank() == 0) {
                is_last = over.load();
            }
            do_all(jobs, group);
        }
    });
    changing.join();
    CHECK(first.count() > 0 && second.count() > 0, first.count() << " and " << second.count());
    CHECK(flight::begin(facts_of(1)).number() == 0, "it was stopped");
    // Where it goes on later, it goes on counting.
    const uint64_t before = first.count();
    flight::record_to(first.descriptor());
    CHECK(flight::begin(facts_of(2)).number() == before + 1, before);
}

TEST(a_call_may_end_after_recording) {
    const Ring ring(64);
    World world(2);
    const Handle task = world[0].start(meeting(), false);
    CHECK(ring.count() == 1 && ring[1].is_open(), ring.count());
    flight::record_to(-1);
    world[1].start(meeting(), false);
    CHECK(world[0].wait(*task, options.patience) == complete, world[0].failure());
    CHECK(ring.count() == 1 && ring[1].is_open(), "nothing is written to a file that was given back");
}

TEST(the_clock_of_records) {
    const Ring ring(64);
    const Recorded recorded = flight::begin(facts_of(1));
    const auto ns_of = [&](uint64_t ticks) {
        return static_cast<double>(ring.clock().ns.load()) +
               static_cast<double>(static_cast<int64_t>(ticks - ring.clock().ticks.load())) *
                   ring.clock().ns_per_tick.load();
    };
    for (int turn = 0; turn < 3; ++turn) {
        const flight::Moment moment = flight::now();
        const double wrong_ns = std::abs(ns_of(moment.ticks) - static_cast<double>(moment.ns));
        CHECK(wrong_ns < 1e6, wrong_ns << " ns off after " << turn << " readings");
        std::this_thread::sleep_for(std::chrono::milliseconds(150));
        const double before = ring.clock().ns_per_tick.load();
        flight::refine_clock();
        CHECK(!flight::has_counter || ring.clock().ns_per_tick.load() != before, before);
    }
    recorded.end(false);
    const double taken_ns = ns_of(ring[1].ended) - ns_of(ring[1].began);
    CHECK(taken_ns > 440e6 && taken_ns < options.patience * 1e9, taken_ns);
}

TEST(files_that_are_no_rings) {
    const Ring good(64);
    const auto is_refused = [](int descriptor) {
        try {
            flight::record_to(descriptor);
        } catch (const std::invalid_argument &) {
            return true;
        }
        return false;
    };
    for (const uint64_t records : {uint64_t{0}, uint64_t{63}, uint64_t{128}, uint64_t{1} << 40, ~uint64_t{0}}) {
        Ring bad(64, false);
        pwrite(bad.descriptor(), &records, sizeof(records), offsetof(flight::Header, records));
        CHECK(is_refused(bad.descriptor()), records << " records");
    }
    Ring bad(64, false);
    CHECK(pwrite(bad.descriptor(), "COMMFR00", 8, 0) == 8, "magic");
    CHECK(is_refused(bad.descriptor()), "another magic");
    const int small = create_memory(100);
    int ends[2];
    CHECK(pipe(ends) == 0, "no pipe");
    for (const int descriptor : {small, ends[0], 12345}) {
        CHECK(is_refused(descriptor), descriptor);
    }
    for (const int descriptor : {small, ends[0], ends[1]}) {
        close_memory(descriptor);
    }
    const uint64_t before = good.count();
    flight::begin(facts_of(1));
    CHECK(good.count() == before + 1, "it goes on as before");
}

TEST(forked_children_record_nothing) {
    const Ring ring(64);
    const Recorded recorded = flight::begin(facts_of(1));
    const int child = fork();
    CHECK(child >= 0, "no process");
    if (child == 0) {
        const bool good = flight::begin(facts_of(2)).number() == 0;
        flight::record_to(-1);
        _exit(good ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, status);
    CHECK(ring.count() == 1, ring.count());
    recorded.end(false);
    CHECK(!ring[1].is_open() && flight::begin(facts_of(2)).number() == 2, "its parent goes on");
}
