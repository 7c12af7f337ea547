// Chooses among a few candidates from how long real calls took.
//
// It computes with integers from what it is given alone, so learners on several ranks that are given the same stay
// alike, and their ranks need no message to agree.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace shm {

// The last durations of one kind of call.
class Durations {
public:
    void add(uint64_t ns);
    void clear() { count_ = at_ = 0; }
    int count() const { return count_; }
    // 0 where there are none.
    uint64_t median() const;
    uint64_t least() const;
    // As the median; of an even number, the greater one in the middle.
    uint64_t upper_median() const { return at(count_ / 2); }

    static constexpr int most = 31;

private:
    uint64_t at(int place) const;
    std::array<uint64_t, most> ns_{};
    uint8_t count_ = 0, at_ = 0;
};

class Learner {
public:
    static constexpr int most_candidates = 6;

    // How the next call is done, and what its duration says.
    struct Choice {
        uint8_t candidate = 0;
        bool counts = false;  // not the first calls after a change, which find the caches as the ones before left them
        bool tries = false;   // one of a trial
    };

    using Nanoseconds = std::array<uint64_t, most_candidates>;

    // Of `candidates` of them, `first` is used until there are durations of all. `are_long`: the calls take so long
    // that few of them have to do for a trial. `known_ns`: how long calls took elsewhere with each; where all are
    // known, these stand until calls here differ from them, or are so many that a comparison costs little. `warm_up`:
    // how many calls with each candidate come before one that says how long it takes, after calls with others.
    using Calls = std::array<uint8_t, most_candidates>;
    explicit Learner(int candidates, int first = 0, bool are_long = false, const Nanoseconds &known_ns = {},
                     const Calls &warm_up = {});

    // Whether the next call matters no more than others: one in some of these is enough to learn from.
    bool is_steady() const { return settled_ && !under_trial_ && !suspects_ && uncounted_left_ == 0; }
    Choice next();
    // The duration of a call that was done so; 0 where nobody measured it. In the order of the calls, any time later.
    // `calls`: so many were done since the one before it, whose end was `elapsed_ns` before its beginning.
    void observe(const Choice &choice, uint64_t duration_ns, uint32_t calls = 1, uint64_t elapsed_ns = 0);

    // The cores seem to have moved: has a look at each other candidate that the calls since the last such looks pay
    // for. Returns whether that is settled; else it has to be asked for again.
    bool look_at_all();

    int best() const { return best_; }
    int candidates() const { return count_; }
    // How long calls took with a candidate lately, or before a look at it that is under way; 0 is unknown.
    uint64_t typical_ns(int candidate) const {
        const Candidate &of = candidates_[static_cast<size_t>(candidate)];
        return of.durations.count() > 0 ? of.durations.median() : of.before_ns;
    }
    // Whether every candidate had its trials.
    bool has_settled() const { return settled_; }
    // How often all were compared, with one that is under way.
    uint32_t comparisons() const { return comparisons_; }
    // How often another became the best.
    uint32_t changes() const { return changes_; }
    // How often because it had become faster by far, as after a move of the cores.
    uint32_t upsets() const { return upsets_; }

private:
    // Trials may take this part of the time: one in so many nanoseconds.
    static constexpr uint64_t share = 400;
    // Faster by one part in so many counts, and only if several trials say so.
    static constexpr uint64_t margin = 32;
    static constexpr int trials_to_win = 3;
    // A look is so many calls, of which all but the first count: one may be interrupted.
    static constexpr uint8_t calls_of_look = 3;
    // A pause pays for looks that take one part in so many of it.
    static constexpr uint64_t share_of_pause = 100;
    // The best is left within a few calls for one that is faster by one part in so many, called in turns with it.
    static constexpr uint64_t clear_margin = 4;
    // The best's last calls, of which the least says how long it takes now: one may have been interrupted.
    static constexpr size_t lately = 3;
    // A look without that warm-up is worth a trial with it, unless it takes so many times as long as the best.
    static constexpr uint64_t cold_factor = 2;
    // After a look in which it was so many times as fast, a candidate needs no trial; by more, a clock is wrong.
    static constexpr uint64_t sure_factor = 2, most_factor = 64;
    // Whoever takes so many halves of the least time in two rounds of a comparison is left out of the others. One may
    // be the first that writes to some memory.
    static constexpr uint64_t hopeless_halves = 3;
    static constexpr uint32_t least_calls_between_changes = 1000;
    // So that most calls of a program with a pause after each are no looks.
    static constexpr uint32_t least_calls_between_pauses = 20;
    static constexpr uint32_t least_calls_between_looks = 400;
    // What was known is wrong where the machine was busy when it was measured.
    static constexpr uint32_t calls_to_verification = 500;
    static constexpr uint32_t least_calls_between_comparisons = 1000, most_calls_between_comparisons = 16000;

    struct Candidate {
        Durations durations;
        uint64_t before_ns = 0;  // the median of durations that were cleared for a look or a trial
        uint64_t credit_ns = 0;  // what a trial may cost by now
        uint8_t arrived = 0;     // of the calls of a trial
        uint8_t wins = 0;
        bool is_paid = false;  // a look at it
    };

    void compare_all();
    void begin_trial(int candidate, bool is_look = false, bool is_cold = false);
    bool is_worth_a_trial(int candidate, uint64_t now_ns) const;
    uint64_t cost_ns_of_look(int candidate, uint64_t least_part) const;
    void end_trial(int candidate);
    bool look_for_regret(uint64_t duration_ns, uint32_t calls);
    uint64_t least_lately() const;
    // Long enough to pay for a look.
    bool is_long(uint64_t pause_ns) const {
        return 8 * (pause_ns / share_of_pause) > calls_of_look * candidates_[best_].durations.median();
    }
    int fastest_other() const;
    bool begin_duel(int rival, uint64_t now_ns);
    void end_duel();
    void upset(int candidate);
    void pay_for_looks(uint64_t left_ns);
    bool is_hopeless(int candidate) const;
    void settle();
    void look_for_trial();
    bool has_jumped() const;
    bool is_upset(int candidate) const;
    void change_to(int candidate);
    static bool is_faster(uint64_t ns, uint64_t than_ns, uint64_t parts = margin) {
        return ns > 0 && ns * (parts + 1) < than_ns * parts;
    }

    std::array<Candidate, most_candidates> candidates_{};
    const uint8_t count_;
    const uint8_t skipped_calls_, counted_calls_, rounds_;  // of a trial, and of a comparison
    const Calls warm_up_;
    uint8_t first_, best_;
    bool settled_ = false;
    // Of a comparison: candidates whose trial in this round has not begun, and rounds after this one.
    uint8_t to_compare_ = 0, rounds_left_ = 0;
    uint8_t tried_ = 0, trial_left_ = 0;  // whose trial is handed out now, and its calls
    uint8_t trial_calls_ = 0;             // as many as it had at its beginning
    bool under_trial_ = false;            // or durations of one are still to come
    bool is_look_ = false;                // of a few calls, which only say whether a trial is worth its time
    uint8_t payments_ = 0;
    // Whether a trial of a rival is followed by one of the best, and which of the two is under way.
    enum class Duel : uint8_t { none, rival, best };
    Duel duel_ = Duel::none;
    uint8_t rival_ = 0;
    std::array<uint64_t, lately> lately_ns_{};  // of the best; 0 is unknown
    uint8_t lately_at_ = 0;
    bool was_after_pause_ = false;  // the last call that was measured
    bool suspects_ = false;         // after a call that took longer than another candidate is known to take
    uint64_t regretted_ns_ = 0;     // how long the best took when a duel began
    uint64_t regret_ns_ = 0;        // what calls took longer than the fastest other is known to take
    uint32_t trials_begun_ = 0, trials_ended_ = 0;
    uint8_t uncounted_left_ = 0;
    uint64_t reference_ns_ = 0;                            // of the best, soon after it was chosen
    uint32_t rest_ = least_calls_between_comparisons / 2;  // calls until all may be compared again
    uint32_t calls_since_change_ = 0, calls_since_comparison_ = 0, calls_since_looks_ = least_calls_between_looks;
    uint32_t changes_ = 0, upsets_ = 0, comparisons_ = 0;
    bool may_correct_ = true;  // a comparison of few calls may have been wrong
    uint32_t unverified_ = 0;  // calls until what was known from elsewhere is compared here
};

}  // namespace shm
