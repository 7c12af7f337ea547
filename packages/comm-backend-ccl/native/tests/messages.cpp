// Point-to-point with tags and from any source: which receive gets which message.

#include "ranks.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

using namespace shm;

namespace tests {

namespace {

// A message of `count` times `value`, on its way.
class Sent {
public:
    Sent(Group &group, int to, int tag, size_t count, uint8_t value) : group_(&group), memory_(count, value) {
        Request request = request_to(send, to, tag, count);
        request.input = memory_.data();
        task_ = group.start(request, true);
    }

    static Request request_to(int operation, int peer, int tag, size_t count) {
        Request request;
        request.operation = static_cast<uint8_t>(operation);
        request.dtype = shm::uint8;
        request.root = peer, request.tag = tag, request.count = count;
        return request;
    }
    int wait(double seconds = options.patience) { return group_->wait(*task_, seconds); }

private:
    Group *group_;
    std::vector<uint8_t> memory_;
    Handle task_;
};

// A receive of `count` bytes.
class Received {
public:
    Received(Group &group, int from, int tag, size_t count, bool watched = false) : group_(&group), memory_(count, 0) {
        Request request = Sent::request_to(receive, from, tag, count);
        request.output = memory_.data();
        task_ = group.start(request, watched);
    }

    int state() const { return task_->now(); }
    int source() const { return task_->source.load(); }
    int wait(double seconds = options.patience) { return group_->wait(*task_, seconds); }
    // The value that all of it has.
    int value() {
        CHECK(wait() == complete, "source " << source() << ", " << group_->failure());
        for (const uint8_t one : memory_) {
            CHECK(one == memory_[0], "a part of another message");
        }
        return memory_[0];
    }

private:
    Group *group_;
    std::vector<uint8_t> memory_;
    Handle task_;
};

// Less than a slot of a message, and more than all of them.
constexpr size_t small = 100, large = 700 << 10;

}  // namespace

// Receives in the reverse order of tags, and messages of one tag in their own.
TEST(messages_with_tags) {
    for (const size_t count : {small, large}) {
        World world(2);
        world.run([&](Group &group) {
            if (group.rank() == 0) {
                std::vector<Sent> sent;
                sent.reserve(12);
                for (int turn = 0; turn < 3; ++turn) {
                    for (int tag = 0; tag < 4; ++tag) {
                        sent.emplace_back(group, 1, tag, count + static_cast<size_t>(tag),
                                          static_cast<uint8_t>(10 * tag + turn));
                    }
                }
                for (Sent &one : sent) {
                    CHECK(one.wait() == complete, group.failure());
                }
            } else {
                for (int tag = 3; tag >= 0; --tag) {
                    for (int turn = 0; turn < 3; ++turn) {
                        Received one(group, turn == 1 ? any_source : 0, tag, count + static_cast<size_t>(tag));
                        CHECK(one.value() == 10 * tag + turn, "tag " << tag << ", " << one.value());
                        CHECK(turn != 1 || one.source() == 0, one.source());
                    }
                }
            }
        });
    }
}

// Receives that were posted before anything was sent.
TEST(receives_are_matched_in_their_order) {
    World world(3);
    world.run([&](Group &group) {
        Request meeting;
        meeting.operation = barrier;
        if (group.rank() == 0) {
            Received other_tag(group, 1, 9, small, true), first(group, any_source, 5, small, true),
                second(group, 1, 5, small, true), third(group, any_source, 5, small, true);
            group.run(Request(meeting), 1);
            CHECK(first.value() == 1 && first.source() == 1, first.value() << " of " << first.source());
            CHECK(second.value() == 2 && second.source() == 1, second.value() << " of " << second.source());
            CHECK(other_tag.state() == pending && third.state() == pending, "nobody has sent these");
            Sent go(group, 2, 0, small, 0);
            CHECK(third.value() == 3 && third.source() == 2, third.value() << " of " << third.source());
            CHECK(go.wait() == complete, group.failure());
            Sent last(group, 1, 0, small, 0);
            CHECK(other_tag.value() == 4, other_tag.value());
        } else {
            if (const Handle left = group.run(Request(meeting), 1)) {
                CHECK(group.wait(*left, options.patience) == complete, group.failure());
            }
            if (group.rank() == 1) {
                Sent one(group, 0, 5, small, 1), two(group, 0, 5, small, 2);
                CHECK(one.wait() == complete && two.wait() == complete, group.failure());
            }
            CHECK(Received(group, 0, 0, small).value() == 0, "go");
            Sent last(group, 0, group.rank() == 1 ? 9 : 5, small, group.rank() == 1 ? 4 : 3);
            CHECK(last.wait() == complete, group.failure());
        }
    });
}

// Every message arrives once, those of a rank in their order, and no rank is left out while another goes on.
TEST(messages_from_any_source) {
    constexpr int size = 4, count = 200;
    for (const size_t bytes : {size_t{0}, small, large / 8}) {
        World world(size);
        world.run([&](Group &group) {
            if (group.rank() != 0) {
                for (int turn = 0; turn < count; ++turn) {
                    Sent one(group, 0, 7, bytes, static_cast<uint8_t>(turn));
                    CHECK(one.wait() == complete, group.failure());
                }
                return;
            }
            std::map<int, int> next;
            for (int turn = 0; turn < (size - 1) * count; ++turn) {
                Received one(group, any_source, 7, bytes);
                CHECK(one.wait() == complete, group.failure());
                const int expected = next[one.source()]++;
                CHECK(bytes == 0 || one.value() == expected, one.value() << " of " << one.source());
            }
            for (int source = 1; source < size; ++source) {
                CHECK(next[source] == count, next[source] << " of " << source);
            }
        });
    }
}

// A message that is being kept when somebody asks for it.
TEST(a_kept_message_is_taken_while_it_arrives) {
    World world(2);
    world.run([&](Group &group) {
        if (group.rank() == 0) {
            Sent one(group, 1, 1, large, 11), two(group, 1, 2, small, 22);
            CHECK(one.wait() == complete && two.wait() == complete, group.failure());
        } else {
            Received later(group, 0, 2, small);
            for (int look = 0; look < 3; ++look) {
                later.wait(0);
            }
            Received first(group, any_source, 1, large);
            CHECK(first.value() == 11 && later.value() == 22, first.value());
        }
    });
}

TEST(messages_that_no_receive_asks_for_are_bounded) {
    const size_t before = std::exchange(Inbox::most_kept_bytes, size_t{1} << 20);
    for (const bool fits : {true, false}) {
        World world(2);
        world.run([&](Group &group) {
            const size_t count = (size_t{1} << 18) + (fits ? 0 : 1);
            if (group.rank() == 0) {
                for (int turn = 0; turn < 4; ++turn) {
                    Sent one(group, 1, 1, count, 1);
                    one.wait();
                }
                if (!group.broken()) {
                    Sent(group, 1, 2, small, 2).wait();
                }
            } else {
                Received one(group, 0, 2, small);
                CHECK(one.wait() == (fits ? complete : failed), group.failure());
                const bool tells = group.failure().find("rank 1 cannot keep more than 1 MiB of messages") == 0;
                CHECK(fits != tells, group.failure());
            }
        });
    }
    Inbox::most_kept_bytes = before;
}

TEST(sizes_are_compared_by_tag) {
    for (const bool kept : {false, true}) {
        World world(2);
        world.run([&](Group &group) {
            if (group.rank() == 0) {
                Sent one(group, 1, 1, small, 1);
                if (kept) {
                    Sent(group, 1, 2, small, 2).wait();
                }
            } else {
                CHECK(!kept || Received(group, 0, 2, small).value() == 2, "tag 2");
                Received wrong(group, any_source, 1, small + 1);
                CHECK(wrong.wait() == failed, wrong.state());
                CHECK(group.failure().find("rank 0 sends 100 x uint8, and rank 1 expects 101 x uint8") !=
                          std::string::npos,
                      group.failure());
            }
        });
    }
}

TEST(who_is_awaited_from_any_source) {
    World world(3);
    Received any(world[0], any_source, 1, small, true), named(world[2], 1, 1, small, true);
    CHECK(world[0].missing() == 0b110, world[0].missing());
    CHECK(world[2].missing() == 0b010, world[2].missing());
    world[0].time_out();
    CHECK(any.wait() == failed && named.wait() == failed, "the others learn it");
    int finder;
    uint64_t missing;
    CHECK(world[2].has_timed_out(finder, missing) && finder == 0 && missing == 0b110, finder << ' ' << missing);
}

}  // namespace tests
