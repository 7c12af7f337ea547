// Learners that are given durations: recorded ones, and such with noise, jumps and lies.

#include "tuning/learner.hpp"
#include "check.hpp"
#include "progress/group.hpp"
#include "tuning/streaming_copy.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <random>
#include <string>
#include <vector>

using namespace tests;
using shm::Learner;

namespace {

// As many calls as a rank may be ahead of what it learns from.
constexpr size_t lag = 8;

// µs a call of each candidate that two ranks have by methods_for(); the wide ring's with its handicap, as the learner
// is told. The usual one is the first; the order of the others does not matter to a learner.
struct Machine {
    const char *name;
    int operation;
    bool is_eager;
    std::vector<double> us;
    int candidates() const { return static_cast<int>(us.size()); }
    double best() const { return *std::min_element(us.begin(), us.end()); }
};

// Xeon, model 207 (family 6), and EPYC, family 26: cached, streamed and single copy or another number of stages were
// measured with CCL_SHARED_MEMORY_TRANSFER, and the fourth is synthetic. "synthetic": between two complexes of an EPYC
// 9004, from the figures of decision 11. Others name the decision that has their first figures, and those of the wide
// and the near ring; the rest of the row is synthetic: twice as long around the caches within a complex (decision
// 11), a tenth more with another number of stages, half as long again out of the peer's memory.
const std::vector<Machine> machines{
    {"Xeon 207, all_reduce of 256 KiB", shm::all_reduce, false, {31.5, 56.9, 52.5, 35}},
    {"Xeon 207, all_reduce of 1 MiB", shm::all_reduce, false, {123.6, 161.8, 220.7, 136}},
    {"Xeon 207, all_gather of 1 MiB, hot", shm::all_gather, false, {100.6, 125.8, 60.7}},
    {"Xeon 207, float16 all_reduce of 1 MiB", shm::all_reduce, false, {141, 202.7, 215.2, 155}},
    {"Xeon 207, all_reduce of 64 MiB", shm::all_reduce, false, {11900, 13900, 15800, 13100}},
    {"EPYC within a complex, all_reduce of 1 MiB", shm::all_reduce, false, {59, 115, 75, 65}},
    {"EPYC between complexes, synthetic, 64 KiB", shm::all_reduce, true, {31, 6, 11, 38}},
    {"EPYC between complexes, synthetic, 1 MiB", shm::all_reduce, false, {486, 87, 120, 505}},
    {"EPYC between complexes, synthetic, 64 MiB", shm::all_reduce, false, {30900, 9000, 12000, 32100}},
    {"EPYC 26, all_reduce of 64 KiB", shm::all_reduce, true, {2.75, 6.75, 10.6, 3.2}},
    {"EPYC 26, all_reduce of 1 MiB", shm::all_reduce, false, {42, 87.9, 103.6, 46}},
    {"EPYC 26, all_reduce of 16 MiB", shm::all_reduce, false, {941, 1909, 3154, 1035}},
    // Small chunks, streamed, larger chunks, the near ring, single copy.
    {"EPYC 26 near, decision 14, fresh broadcast of 1 MiB", shm::broadcast, false, {20, 40, 26, 22, 30}},
    {"EPYC 26 far, decision 14, broadcast of 1 MiB", shm::broadcast, false, {33, 38, 41, 36, 50}},
    {"Xeon 106, decision 16, fresh broadcast of 1 MiB", shm::broadcast, false, {98, 196, 108, 70, 147}},
    {"Xeon 106, decision 16, hot broadcast of 1 MiB", shm::broadcast, false, {78, 156, 86, 71, 117}},
    {"Xeon 106, decision 16, broadcast of 256 KiB", shm::broadcast, false, {22, 44, 24, 18, 33}},
    // Cached, streamed, the wide ring, single copy. The wide ring is faster by 3 to 8 % on that Xeon.
    {"Xeon 106, decision 16, all_gather of 64 KiB", shm::all_gather, true, {8.4, 16.8, 1.25 * 7.9, 12.6}},
    {"EPYC 25/17 near, decision 16, all_reduce of 16 KiB", shm::all_reduce, true, {3.6, 7.2, 1.25 * 2.2, 5.4}},
    {"EPYC 25/17 near, decision 16, all_reduce of 64 KiB", shm::all_reduce, true, {7.1, 14.2, 1.25 * 5.2, 10.7}},
    {"EPYC 25/17 near, decision 16, all_gather of 64 KiB", shm::all_gather, true, {7.1, 14.2, 1.25 * 3.9, 10.7}},
    {"EPYC 25/17 far, decision 16, all_gather of 64 KiB", shm::all_gather, true, {31, 6, 1.25 * 17, 11}},
    // Cached, streamed, single copy, another number of stages.
    {"EPYC 25/17 near, decision 14, all_reduce of 256 KiB", shm::all_reduce, false, {36, 88, 104, 42}},
    {"EPYC 25/17 far, decision 14, all_reduce of 256 KiB", shm::all_reduce, false, {160, 150, 102, 180}},
    {"EPYC 25/1 near, decision 14, all_reduce of 1 MiB", shm::all_reduce, false, {53, 145, 140, 60}},
    {"EPYC 25/1 far, decision 14, all_reduce of 1 MiB", shm::all_reduce, false, {500, 106, 180, 520}},
    {"five that are alike", shm::broadcast, false, {100, 101, 140, 102, 103}},
};

// After few calls, or with much noise, one that is slower by a tenth may be the best for a while.
constexpr double nearly = 1.15;

class Noise {
public:
    Noise(uint64_t seed, double sigma) : random_(seed), normal_(0, sigma) {}
    // Sometimes a call is interrupted, for any time.
    double of(double us) {
        const double interrupted = uniform_(random_) < 0.02 ? us * 20 * uniform_(random_) : 0;
        return us * std::exp(normal_(random_)) + interrupted;
    }

private:
    std::mt19937_64 random_;
    std::normal_distribution<double> normal_;
    std::uniform_real_distribution<double> uniform_{0, 1};
};

struct Run {
    double calls_us = 0, trials_us = 0;  // of trials, what they took more than the best
    std::vector<int> chosen;
};

// `times(call)` are the times of the candidates at that call; `seen(call, us)` is what the learner is told of it.
template <class Times, class Seen>
Run simulate(Learner &learner, size_t calls, const Times &times, const Seen &seen, Noise &noise) {
    std::deque<std::pair<Learner::Choice, double>> under_way;
    Run run;
    for (size_t call = 0; call < calls; ++call) {
        if (under_way.size() == lag) {
            const auto &[choice, us] = under_way.front();
            learner.observe(choice, static_cast<uint64_t>(seen(call - lag, us) * 1000));
            under_way.pop_front();
        }
        const Learner::Choice choice = learner.next();
        const std::vector<double> &us = times(call);
        run.calls_us += us[choice.candidate];
        run.trials_us +=
            choice.tries ? std::max(0.0, us[choice.candidate] - us[static_cast<size_t>(learner.best())]) : 0;
        run.chosen.push_back(choice.candidate);
        under_way.emplace_back(choice, noise.of(us[choice.candidate]));
    }
    for (const auto &[choice, us] : under_way) {
        learner.observe(choice, static_cast<uint64_t>(seen(calls, us) * 1000));
    }
    return run;
}

double as_it_was(size_t, double us) { return us; }

}  // namespace

TEST(learner_finds_the_fastest) {
    for (const Machine &machine : machines) {
        CHECK(
            machine.candidates() == shm::methods_for(machine.operation, 2, shm::float32, machine.is_eager, true).count,
            machine.name << " has " << machine.candidates() << " candidates");
        for (const int first : {0, 1, machine.candidates() - 1}) {
            for (const double sigma : {0.02, 0.1, 0.2}) {
                Noise noise(options.seed + static_cast<uint64_t>(first), sigma);
                Learner learner(machine.candidates(), first);
                const auto times = [&](size_t) -> const std::vector<double> & { return machine.us; };
                simulate(learner, 4000, times, as_it_was, noise);
                const uint32_t changes = learner.changes();
                const Run steady = simulate(learner, 20000, times, as_it_was, noise);
                const double best = machine.best();
                const double mean = steady.calls_us / static_cast<double>(steady.chosen.size());
                CHECK(mean <= 1.05 * best, machine.name << ", noise " << sigma << ", begun with " << first
                                                        << ": calls take " << mean << " instead of " << best << " us");
                const double found = machine.us[static_cast<size_t>(learner.best())];
                CHECK(found <= (sigma > 0.1 ? nearly : 1.05) * best,
                      machine.name << ", noise " << sigma << ", begun with " << first << ": ends with " << found
                                   << " instead of " << best << " us");
                CHECK(learner.changes() - changes <= 20,
                      machine.name << ", noise " << sigma << ": " << learner.changes() - changes << " changes");
                const double spent = steady.trials_us / steady.calls_us;
                CHECK(spent < 0.01, machine.name << ", noise " << sigma << ": learning took " << 100 * spent << " %");
            }
        }
    }
}

// The hypervisor moves the cores, again and again.
TEST(learner_follows_the_cores) {
    const std::vector<double> near{59, 115, 75}, far{486, 87, 120};
    Noise noise(options.seed, 0.1);
    Learner learner(3);
    bool is_far = false;
    const auto times = [&](size_t) -> const std::vector<double> & { return is_far ? far : near; };
    for (int turn = 0; turn < 10; ++turn, is_far = !is_far) {
        const uint32_t changes = learner.changes();
        simulate(learner, 5000, times, as_it_was, noise);
        CHECK(learner.best() == (is_far ? 1 : 0), "turn " << turn << ": " << learner.best());
        CHECK(learner.changes() - changes <= 3, "turn " << turn << ": " << learner.changes() - changes << " changes");
    }
}

namespace {

// Calls of which one in sixteen is looked at.
class SampledCalls {
public:
    explicit SampledCalls(int candidates) : learner_(candidates) {}
    // Returns how many took at least half as long again as the best candidate.
    size_t run(size_t calls, const std::vector<double> &us, double factor = 1) {
        size_t slow = 0;
        for (size_t call = 0; call < calls; ++call) {
            ++unseen_;
            ++number_;
            auto candidate = static_cast<size_t>(learner_.best());
            if (!learner_.is_steady() || unseen_ >= 16) {
                while (!under_way_.empty() && number_ - under_way_.front().number > lag) {
                    const Seen &seen = under_way_.front();
                    learner_.observe(seen.choice, static_cast<uint64_t>(seen.us * 1000), seen.covered);
                    under_way_.pop_front();
                }
                const Learner::Choice choice = learner_.next();
                candidate = choice.candidate;
                under_way_.push_back({choice, unseen_, noise_.of(factor * us[candidate]), number_});
                unseen_ = 0;
            }
            slow += us[candidate] > 1.5 * *std::min_element(us.begin(), us.end()) ? 1 : 0;
        }
        return slow;
    }

private:
    struct Seen {
        Learner::Choice choice;
        uint32_t covered;
        double us;
        size_t number;
    };
    Learner learner_;
    Noise noise_{options.seed, 0.1};
    std::deque<Seen> under_way_;
    uint32_t unseen_ = 0;
    size_t number_ = 0;
};

}  // namespace

// Calls are slow for no longer than it takes to see three of them and to compare two candidates, however often the
// learner was wrong before. That another has become faster, looks at it say.
TEST(learner_leaves_what_has_become_slow) {
    const std::vector<double> near{13, 37, 51, 14}, far{160, 36, 51, 165};
    SampledCalls calls(4);
    // All candidates slow down, and recover: false alarms, each of which delays the next comparison of all.
    for (int turn = 0; turn < 12; ++turn) {
        calls.run(20000, near, turn % 2 == 1 ? 1.8 : 1);
    }
    calls.run(3000, near);
    const size_t after_alarm = calls.run(8000, far);
    CHECK(after_alarm < 250, after_alarm << " calls are slow soon after a false alarm");
    calls.run(20000, near);
    constexpr int turns = 10;
    constexpr size_t most = 20000;
    size_t slow_when_near = 0;
    for (int turn = 0; turn < turns; ++turn) {
        const size_t slow = calls.run(most, far);
        CHECK(slow < 250, "turn " << turn << ": " << slow << " calls are slow");
        slow_when_near += calls.run(most, near);
    }
    CHECK(slow_when_near < turns * most / 3, slow_when_near << " calls are slow");
}

// A program that calls for a moment, and does other things in between: the cores are others each time. Its calls are
// too few for the share of time that trials have, but the pauses pay for a look.
TEST(learner_looks_after_pauses) {
    const std::vector<double> near{36, 88, 104, 42}, far{160, 150, 102, 180};
    Noise noise(options.seed, 0.05);
    Learner learner(4);
    int slow_blocks = 0;
    double calls_us = 0, least_us = 0;
    std::deque<std::pair<Learner::Choice, double>> under_way;
    for (int block = 0; block < 300; ++block) {
        // A second is busy after nine that are not.
        const bool is_far = block % 30 >= 27;
        const std::vector<double> &us = is_far ? far : near;
        const double best = *std::min_element(us.begin(), us.end());
        double spent = 0;
        for (int call = 0; call < 200; ++call) {
            if (under_way.size() == lag) {
                const auto &[choice, took] = under_way.front();
                const bool after_pause = call == lag;
                learner.observe(choice, static_cast<uint64_t>(took * 1000), 1, after_pause ? 1'000'000'000 : 1000);
                under_way.pop_front();
            }
            const Learner::Choice choice = learner.next();
            spent += us[choice.candidate];
            under_way.emplace_back(choice, noise.of(us[choice.candidate]));
        }
        slow_blocks += !is_far && block > 10 && spent > 1.5 * 200 * best ? 1 : 0;
        calls_us += is_far ? 0 : spent;
        least_us += is_far ? 0 : 200 * best;
    }
    CHECK(slow_blocks <= 40, slow_blocks << " of 270 blocks are slow");
    CHECK(calls_us < 1.25 * least_us, "it takes " << calls_us / least_us << " times as long as the best");
}

// Blocks of a few calls, with seconds between them in which the cores move: what was slow is the fastest, by far.
TEST(learner_finds_what_has_become_fast_in_a_pause) {
    const std::vector<double> near{53, 145, 60, 140}, far{500, 106, 520, 180};
    Noise noise(options.seed, 0.03);
    Learner learner(4);
    std::deque<std::pair<Learner::Choice, double>> under_way;
    int slow_calls = 0, blocks = 0;
    for (int block = 0; block < 60; ++block) {
        const std::vector<double> &us = block % 6 < 3 ? far : near;
        const double best = *std::min_element(us.begin(), us.end());
        blocks += block >= 6 ? 1 : 0;
        for (int call = 0; call < 80; ++call) {
            if (under_way.size() == 2) {
                const auto &[choice, took] = under_way.front();
                learner.observe(choice, static_cast<uint64_t>(took * 1000), 1, call == 2 ? 2'000'000'000 : 1000);
                under_way.pop_front();
            }
            const Learner::Choice choice = learner.next();
            slow_calls += block >= 6 && us[choice.candidate] > 1.3 * best ? 1 : 0;
            under_way.emplace_back(choice, noise.of(us[choice.candidate]));
        }
    }
    CHECK(slow_calls < 15 * blocks, slow_calls << " of " << 80 * blocks << " calls are slow");
}

// A program with one call a second leaves what has become slow as well.
TEST(learner_with_one_call_after_each_pause) {
    const std::vector<double> near{53, 145, 60, 140}, far{500, 106, 520, 180};
    Noise noise(options.seed, 0.03);
    Learner learner(4);
    const auto run = [&](int calls, const std::vector<double> &us) {
        int slow_calls = 0;
        for (int call = 0; call < calls; ++call) {
            const Learner::Choice choice = learner.next();
            const double took = us[choice.candidate];
            learner.observe(choice, static_cast<uint64_t>(noise.of(took) * 1000), 1, 1'000'000'000);
            slow_calls += took > 1.3 * *std::min_element(us.begin(), us.end()) ? 1 : 0;
        }
        return slow_calls;
    };
    run(300, near);
    const int steady = run(100, near), moved = run(100, far);
    CHECK(steady <= 40, steady << " calls in a hundred are slow while nothing moves");
    CHECK(moved <= 60, moved << " calls in a hundred are slow after a move");
}

// The first calls with a candidate, after others, find its memory in no cache.
TEST(learner_warms_up_what_is_slow_at_first) {
    constexpr int warm_up = 64;
    struct Case {
        const char *name;
        double other_us, cold_us, warm_us;
        int expected;
    };
    for (const Case &one :
         {Case{"near", 6.2, 6.4, 3.8, 1}, Case{"far", 5, 8, 17, 0}, Case{"slower by a tenth", 6, 6.8, 6.6, 0}}) {
        // In a steady loop, and in a few calls between pauses.
        for (const bool pauses : {false, true}) {
            Noise noise(options.seed, 0.05);
            Learner learner(2, 0, false, {}, {0, warm_up});
            std::deque<std::pair<Learner::Choice, double>> under_way;
            int warm_calls = 0, others = 0, last = 0, changes_after = 0;
            double calls_us = 0, trials_us = 0;
            const size_t calls = pauses ? 20'000 : 300'000;
            for (size_t call = 0; call < calls; ++call) {
                if (under_way.size() == lag) {
                    const auto &[choice, took] = under_way.front();
                    const bool after_pause = pauses && call % 400 == lag;
                    learner.observe(choice, static_cast<uint64_t>(took * 1000), 1, after_pause ? 200'000'000 : 1000);
                    under_way.pop_front();
                }
                const int best = learner.best();
                const Learner::Choice choice = learner.next();
                others = choice.candidate == 1 ? 0 : others + 1;
                warm_calls = choice.candidate == 1 ? warm_calls + 1 : others > warm_up ? 0 : warm_calls;
                const double wide_us = warm_calls > warm_up ? one.warm_us : one.cold_us;
                const double us = choice.candidate == 0 ? one.other_us : wide_us;
                under_way.emplace_back(choice, noise.of(us));
                changes_after += call > calls / 2 && best != last ? 1 : 0;
                last = best;
                if (call > calls / 2) {
                    const double best_us = one.expected == 0 ? one.other_us : one.warm_us;
                    calls_us += best_us;
                    trials_us += std::max(0.0, us - best_us);
                }
            }
            const char *kind = pauses ? ", with pauses" : "";
            CHECK(learner.best() == one.expected, one.name << kind << ": ends with candidate " << learner.best());
            CHECK(changes_after == 0, one.name << kind << ": the choice changes " << changes_after << " times");
            CHECK(trials_us < (pauses ? 0.25 : 0.01) * calls_us,
                  one.name << kind << ": trials take " << 100 * trials_us / calls_us << " % of the time");
        }
    }
}

// Of operations that take turns, what was learned of one has arrived before it is called again.
TEST(learners_of_operations_that_take_turns_settle) {
    for (const Machine &machine : machines) {
        for (const size_t kinds : {size_t{1}, size_t{3}, size_t{8}, size_t{20}}) {
            Noise noise(options.seed, 0.1);
            std::vector<Learner> learners(kinds, Learner(machine.candidates()));
            struct Call {
                size_t kind;
                Learner::Choice choice;
                double us;
            };
            std::deque<Call> under_way;
            for (size_t call = 0; call < kinds * 200; ++call) {
                if (under_way.size() == lag) {
                    const Call &done = under_way.front();
                    learners[done.kind].observe(done.choice, static_cast<uint64_t>(done.us * 1000));
                    under_way.pop_front();
                }
                const size_t kind = call % kinds;
                const Learner::Choice choice = learners[kind].next();
                under_way.push_back({kind, choice, noise.of(machine.us[choice.candidate])});
            }
            const double best = machine.best();
            for (const Learner &learner : learners) {
                CHECK(learner.has_settled(), machine.name << ", " << kinds << " kinds: it has not settled");
                const double found = machine.us[static_cast<size_t>(learner.best())];
                CHECK(found <= nearly * best, machine.name << ", " << kinds << " kinds: ends with " << found << " us");
            }
        }
    }
}

// What one call says does not matter, whatever it says; nor does it that nothing is said.
TEST(learner_survives_lies) {
    const std::vector<double> us{59, 115, 75};
    const auto times = [&](size_t) -> const std::vector<double> & { return us; };
    std::mt19937_64 random(options.seed);
    const auto lying = [&](size_t, double real) {
        const uint64_t drawn = random() % 10;
        return drawn == 0 ? 0.0 : drawn == 1 ? 1e-3 : drawn == 2 ? 1e9 : real;
    };
    Noise noise(options.seed, 0.05);
    Learner learner(3, 1);
    simulate(learner, 20000, times, lying, noise);
    CHECK(learner.best() == 0, "ends with " << learner.best());
    Learner unheard(3, 1);
    const Run run = simulate(unheard, 5000, times, [](size_t, double) { return 0.0; }, noise);
    CHECK(unheard.changes() == 0 && unheard.best() == 1, "changed without a reason to " << unheard.best());
    CHECK(std::count(run.chosen.begin(), run.chosen.end(), 1) > 4900, "tried without end");
}

// That ranks choose alike is tested by groups.cpp, of groups that have their durations at different times.
TEST(learner_seldom_changes_among_equals) {
    const std::vector<double> alike{59, 61, 60, 60.5, 59.5, 60};
    for (size_t count = 2; count <= alike.size(); ++count) {
        const std::vector<double> us(alike.begin(), alike.begin() + static_cast<std::ptrdiff_t>(count));
        Noise noise(options.seed, 0.3);
        Learner one(static_cast<int>(count));
        simulate(one, 50000, [&](size_t) -> const std::vector<double> & { return us; }, as_it_was, noise);
        CHECK(one.changes() <= 50, "of " << count << ", it changed " << one.changes() << " times in 50,000 calls");
    }
}

// What a host's profile keeps is read at any time, also in the course of a look, which forgets what it knows first.
TEST(learner_knows_all_candidates_once_it_has_settled) {
    const std::vector<double> us{100, 300, 150, 120};
    Noise noise(options.seed, 0.05);
    Learner learner(4);
    simulate(learner, 500, [&](size_t) -> const std::vector<double> & { return us; }, as_it_was, noise);
    CHECK(learner.has_settled(), "it has not settled");
    for (int call = 0; call < 20000; ++call) {
        const Learner::Choice choice = learner.next();
        for (int one = 0; one < 4; ++one) {
            CHECK(!learner.has_settled() || learner.typical_ns(one) > 0,
                  "call " << call << ": nothing is known of candidate " << one);
        }
        learner.observe(choice, noise.of(us[choice.candidate]));
    }
}

// A profile of the host: nothing is tried at first while calls take as long as it says, and what it has wrong, as the
// machine was busy when it was measured, is corrected.
TEST(learner_starts_from_what_is_known) {
    for (const Machine &machine : machines) {
        Learner::Nanoseconds known{};
        for (size_t one = 0; one < machine.us.size(); ++one) {
            known[one] = static_cast<uint64_t>(machine.us[one] * 1000);
        }
        const auto times = [&](size_t) -> const std::vector<double> & { return machine.us; };
        const double best = machine.best();
        Noise noise(options.seed, 0.1);
        Learner true_one(machine.candidates(), 0, false, known);
        CHECK(true_one.has_settled() && machine.us[static_cast<size_t>(true_one.best())] == best, machine.name);
        const Run run = simulate(true_one, 300, times, as_it_was, noise);
        CHECK(std::count(run.chosen.begin(), run.chosen.end(), true_one.best()) == 300, machine.name << ": it tried");

        std::swap(known[0], known[1]);
        Learner misled(machine.candidates(), 0, false, known);
        simulate(misled, 700, times, as_it_was, noise);
        const double found = machine.us[static_cast<size_t>(misled.best())];
        CHECK(found <= nearly * best,
              machine.name << ", misled: ends with " << found << " instead of " << best << " us");

        for (uint64_t &ns : known) {
            ns *= 10;
        }
        Learner outdated(machine.candidates(), 0, false, known);
        simulate(outdated, 700, times, as_it_was, noise);
        const double late = machine.us[static_cast<size_t>(outdated.best())];
        CHECK(late <= nearly * best,
              machine.name << ", outdated: ends with " << late << " instead of " << best << " us");
    }
    // all_reduce of 64 KiB on an EPYC (family 26, model 2), whose first group had measured it beside other processes.
    Learner deceived(3, 0, false, {27210, 5548, 9123});
    const std::vector<double> us{2.75, 6.75, 10.6};
    Noise noise(options.seed, 0.1);
    simulate(deceived, 700, [&](size_t) -> const std::vector<double> & { return us; }, as_it_was, noise);
    CHECK(deceived.best() == 0, "ends with " << deceived.best());
    Learner in_part(3, 0, false, {1000, 0, 3000});
    CHECK(!in_part.has_settled(), "it takes what is not known for known");
}

// Profiles have the names, and fingerprints the codes.
TEST(methods_keep_their_names) {
    using shm::Method;
    CHECK(Method{}.name() == "cached" && Method{}.code() == 1, "usual");
    const Method streamed{shm::streamed, true, false}, small{shm::cached, true, true},
        read{shm::single_copy, false, false};
    CHECK(streamed.name() == "streamed, by all" && streamed.code() == 10, "by all");
    CHECK(small.name() == "cached, by all, small chunks" && small.code() == 25, "small chunks");
    CHECK(read.name() == "single_copy" && read.code() == 3, "single copy");
    const Method wide{shm::cached, false, false, shm::RingSize::wide},
        near{shm::cached, false, false, shm::RingSize::near};
    CHECK(wide.name() == "cached, wide ring" && wide.code() == 33 && wide.place_code() == 33, "wide ring");
    CHECK(near.name() == "cached, near ring" && near.code() == 65 && near.place_code() == 0, "near ring");
    CHECK(streamed.place_code() == 0, "only the ring is a place");
    for (int operation = 0; operation < shm::operations; ++operation) {
        for (const int ranks : {2, 3}) {
            for (const bool is_eager : {false, true}) {
                const shm::Methods found = shm::methods_for(operation, ranks, shm::float32, is_eager, true);
                CHECK(found.count >= 3 && found.count <= Learner::most_candidates, operation << ": " << found.count);
                for (int one = 0; one < found.count; ++one) {
                    for (int other = 0; other < one; ++other) {
                        CHECK(found.all[one].name() != found.all[other].name() &&
                                  found.all[one].code() != found.all[other].code(),
                              "operation " << operation << " has " << found.all[one].name() << " twice");
                    }
                }
            }
        }
    }
}

// µs of 128 KiB, of 64 MiB on an AMD EPYC of family 25, model 1, and on a Xeon of family 6, model 106. Ranks have up to
// three peers, of which some are farther.
TEST(copies_around_the_caches_are_chosen) {
    using Copy = shm::StreamingCopy;
    struct Processor {
        double lines_us, pages_us;
        Copy::Way faster;
    };
    const std::vector<Processor> processors{{16, 21, Copy::lines}, {20.3, 13.7, Copy::pages}};
    const std::vector<std::vector<double>> distances{{1}, {1, 2}, {1, 1.2, 2.5}, {1, 1, 2, 2}};
    for (size_t first = 0; first < 2; ++first) {
        for (size_t then = 0; then < 2; ++then) {
            for (const std::vector<double> &peers : distances) {
                Copy copies;
                Noise noise(options.seed + first, 0.1);
                size_t trials = 0, slower = 0, changes = 0;
                for (size_t number = 0; number < 6000; ++number) {
                    const Processor &now = processors[number < 3000 ? first : then];
                    const Copy::Way before = copies.best();
                    if (copies.next_is_trial()) {
                        const double us = peers[number % peers.size()];
                        copies.observe(static_cast<uint64_t>(noise.of(us * now.lines_us) * 500),
                                       static_cast<uint64_t>(noise.of(us * now.pages_us) * 500));
                        ++trials;
                    } else if (number < 3000 || number > 3600) {
                        slower += before != now.faster;
                    }
                    changes += copies.best() != before;
                }
                const std::string which = std::to_string(first) + ", then " + std::to_string(then) + ", with " +
                                          std::to_string(peers.size()) + " peers: ";
                CHECK(copies.best() == processors[then].faster, which << "ends with " << int{copies.best()});
                CHECK(slower < 150, which << slower << " copies in the slower way");
                CHECK(changes <= 3, which << changes << " changes");
                CHECK(trials > 90 && trials < 110, which << trials << " trials");
            }
        }
    }
    // Where both are alike, nothing changes, however far some peers are.
    for (const std::vector<double> &peers : distances) {
        Copy copies;
        Noise noise(options.seed, 0.02);
        size_t changes = 0;
        for (size_t number = 0; number < 6000; ++number) {
            const Copy::Way before = copies.best();
            if (copies.next_is_trial()) {
                const double us = 20 * peers[number % peers.size()];
                copies.observe(static_cast<uint64_t>(noise.of(us) * 1e3), static_cast<uint64_t>(noise.of(us) * 1e3));
            }
            changes += copies.best() != before;
        }
        CHECK(changes <= 1, changes << " changes with " << peers.size() << " peers");
    }
}
