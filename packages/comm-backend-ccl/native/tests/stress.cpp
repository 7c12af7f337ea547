// Many small operations of all kinds in groups that overlap, with more of them under way than a rank may be ahead.

#include "ranks.hpp"

#include <array>
#include <cstring>
#include <deque>

using namespace tests;
using namespace shm;

namespace {

constexpr int ranks = 4;
constexpr size_t longest = 300;

const std::vector<std::vector<int>> members{{0, 1, 2, 3}, {0, 1},    {1, 2},    {2, 3},
                                            {3, 0},       {0, 1, 2}, {1, 2, 3}, {3, 1, 0, 2}};

int place_of(int rank, const std::vector<int> &group) {
    for (size_t place = 0; place < group.size(); ++place) {
        if (group[place] == rank) {
            return static_cast<int>(place);
        }
    }
    return -1;
}

// What every rank works out alike.
struct Step {
    size_t group;
    int operation, root, from, dtype;
    size_t count;
    uint64_t seed;
    bool later;  // waited for when others have been started

    explicit Step(Random &random) {
        constexpr int kinds[] = {all_reduce,     all_reduce, shm::reduce, broadcast, all_gather,
                                 reduce_scatter, all_to_all, gather,      scatter,   barrier,
                                 all_to_all_v,   send,       send};
        group = random.below(members.size());
        operation = kinds[random.below(std::size(kinds))];
        const size_t size = members[group].size();
        root = is_rooted(operation) || operation == send ? static_cast<int>(random.below(size)) : -1;
        from =
            operation == send ? static_cast<int>((static_cast<size_t>(root) + 1 + random.below(size - 1)) % size) : -1;
        dtype = random.below(2) == 0 ? int32 : int64;
        count = operation == barrier || operation == all_to_all_v ? 0 : 1 + random.below(longest);
        seed = random.next();
        later = random.below(4) != 0;
    }

    // Element `index` of what `rank` puts in; wraps around.
    uint64_t element(int rank, size_t index) const {
        return seed + static_cast<uint64_t>(rank) * 1000003 + index * 7919;
    }
    uint64_t sum_of(size_t size, size_t index) const {
        uint64_t sum = 0;
        for (size_t rank = 0; rank < size; ++rank) {
            sum += element(static_cast<int>(rank), index);
        }
        return sum;
    }
    size_t sent(int one, int other) const { return (seed >> (one * 4 + other)) % 40; }
};

class Doing {
public:
    Doing(const Step &step, Group &group) : step_(step), group_(&group) {
        const int me = group.rank(), size = group.size();
        Request request;
        const bool sends = step.from == me;
        request.operation = static_cast<uint8_t>(step.operation == send && !sends ? receive : step.operation);
        request.dtype = static_cast<uint8_t>(step.dtype);
        request.op = sum;
        request.count = step.count;
        request.root = sends || step.operation != send ? step.root : step.from;
        size_t input_count = step.count, output_count = step.count;
        if (step.operation == reduce_scatter || step.operation == all_to_all || step.operation == scatter) {
            input_count *= static_cast<size_t>(size);
        }
        if (step.operation == all_gather || step.operation == all_to_all || step.operation == gather) {
            output_count *= static_cast<size_t>(size);
        }
        if (step.operation == all_to_all_v) {
            input_count = output_count = 0;
            for (int other = 0; other < size; ++other) {
                request.input_counts.push_back(step.sent(me, other));
                request.output_counts.push_back(step.sent(other, me));
                input_count += request.input_counts.back(), output_count += request.output_counts.back();
            }
        }
        input_.resize(input_count);
        output_.resize(output_count, 0x5a5a5a5a);
        for (size_t i = 0; i < input_count; ++i) {
            write(input_, i, step.element(me, i));
        }
        request.input = input_.data();
        request.output = step.operation == broadcast ? input_.data() : output_.data();
        task_ = step.later ? group.start(std::move(request), true) : group.run(std::move(request), group.spins());
    }

    void finish(size_t number) {
        const int state = task_ ? group_->wait(*task_, options.patience) : static_cast<int>(complete);
        const int me = group_->rank();
        CHECK(state == complete, "step " << number << " in group " << step_.group << ", operation " << step_.operation
                                         << ", rank " << me << ": state " << state << "; " << group_->failure());
        const bool root_only = step_.operation == shm::reduce || step_.operation == gather || step_.operation == send;
        if (step_.operation == barrier || (root_only && me != step_.root)) {
            return;
        }
        const std::vector<uint64_t> &found = step_.operation == broadcast ? input_ : output_;
        size_t at = 0;
        const auto expect = [&](uint64_t value) {
            const uint64_t got = read(found, at);
            const uint64_t wanted = step_.dtype == int32 ? static_cast<uint32_t>(value) : value;
            CHECK(got == wanted, "step " << number << " in group " << step_.group << ", operation " << step_.operation
                                         << ", rank " << me << ", element " << at << ": " << got << ", not " << wanted);
            ++at;
        };
        const size_t count = step_.count, size = static_cast<size_t>(group_->size()),
                     mine = static_cast<size_t>(me) * count;
        for (size_t one = 0; one < size; ++one) {
            const int from = static_cast<int>(one);
            switch (step_.operation) {
            case all_to_all_v: {
                size_t skipped = 0;
                for (int other = 0; other < me; ++other) {
                    skipped += step_.sent(from, other);
                }
                for (size_t i = 0; i < step_.sent(from, me); ++i) {
                    expect(step_.element(from, skipped + i));
                }
                break;
            }
            case all_gather:
            case gather:
            case all_to_all:
                for (size_t i = 0; i < count; ++i) {
                    expect(step_.element(from, i + (step_.operation == all_to_all ? mine : 0)));
                }
                break;
            default:
                break;
            }
        }
        for (size_t i = 0; at < count; ++i) {
            switch (step_.operation) {
            case all_reduce:
            case shm::reduce:
                expect(step_.sum_of(size, i));
                break;
            case reduce_scatter:
                expect(step_.sum_of(size, mine + i));
                break;
            default:
                expect(step_.element(step_.operation == send ? step_.from : step_.root,
                                     i + (step_.operation == scatter ? mine : 0)));
                break;
            }
        }
    }

private:
    void write(std::vector<uint64_t> &values, size_t index, uint64_t value) const {
        const size_t item = item_bytes(step_.dtype);
        std::memcpy(reinterpret_cast<char *>(values.data()) + index * item, &value, item);
    }
    uint64_t read(const std::vector<uint64_t> &values, size_t index) const {
        const size_t item = item_bytes(step_.dtype);
        uint64_t value = 0;
        std::memcpy(&value, reinterpret_cast<const char *>(values.data()) + index * item, item);
        return value;
    }

    const Step step_;
    Group *group_;
    std::vector<uint64_t> input_, output_;
    Handle task_;
};

}  // namespace

TEST(stress) {
    std::vector<std::unique_ptr<World>> worlds;
    for (const auto &group : members) {
        worlds.push_back(std::make_unique<World>(static_cast<int>(group.size())));
        // Half of the groups learn, others go round the wide ring or around the caches.
        for (size_t place = 0; place < group.size() && worlds.size() % 2 == 0; ++place) {
            (*worlds.back())[static_cast<int>(place)].tuner().fix(worlds.size() % 4 == 0 ? cached : streamed,
                                                                  shm::RingSize::wide);
        }
    }
    std::array<size_t, ranks> finished{};
    on_ranks(ranks, [&](int rank) {
        Random random{options.seed}, mine{options.seed + 100 + static_cast<uint64_t>(rank)};
        std::deque<std::pair<size_t, std::unique_ptr<Doing>>> under_way;
        const auto finish_one = [&] {
            const size_t chosen = mine.below(under_way.size());
            std::swap(under_way[chosen], under_way.front());
            under_way.front().second->finish(under_way.front().first);
            under_way.pop_front();
            ++finished[static_cast<size_t>(rank)];
        };
        for (size_t number = 0; number < options.operations; ++number) {
            const Step step(random);
            const int place = place_of(rank, members[step.group]);
            if (place < 0 || (step.from >= 0 && place != step.from && place != step.root)) {
                continue;
            }
            auto doing = std::make_unique<Doing>(step, (*worlds[step.group])[place]);
            under_way.emplace_back(number, std::move(doing));
            const size_t most = 1 + mine.below(40);
            while (under_way.size() > most) {
                finish_one();
            }
            if (!step.later) {
                under_way.back().second->finish(number);
                under_way.pop_back();
                ++finished[static_cast<size_t>(rank)];
            }
        }
        while (!under_way.empty()) {
            finish_one();
        }
    });
    // Each rank counts for itself how many it had a part in.
    std::array<size_t, ranks> expected{};
    Random random{options.seed};
    for (size_t number = 0; number < options.operations; ++number) {
        const Step step(random);
        for (int rank = 0; rank < ranks; ++rank) {
            const int place = place_of(rank, members[step.group]);
            expected[static_cast<size_t>(rank)] +=
                place >= 0 && (step.from < 0 || place == step.from || place == step.root);
        }
    }
    CHECK(finished == expected, finished[0] << " instead of " << expected[0]);
}
