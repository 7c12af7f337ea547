#include "tuning/learner.hpp"

#include <algorithm>

namespace shm {

void Durations::add(uint64_t ns) {
    ns_[at_] = ns;
    at_ = static_cast<uint8_t>((at_ + 1) % most);
    count_ = static_cast<uint8_t>(std::min(count_ + 1, most));
}

uint64_t Durations::median() const { return at((count_ - 1) / 2); }

// Of all in order.
uint64_t Durations::at(int place) const {
    if (count_ == 0) {
        return 0;
    }
    auto sorted = ns_;
    std::nth_element(sorted.begin(), sorted.begin() + place, sorted.begin() + count_);
    return sorted[static_cast<size_t>(place)];
}

uint64_t Durations::least() const { return count_ == 0 ? 0 : *std::min_element(ns_.begin(), ns_.begin() + count_); }

Learner::Learner(int candidates, int first, bool are_long, const Nanoseconds &known_ns, const Calls &warm_up)
    : count_(static_cast<uint8_t>(candidates)), skipped_calls_(are_long ? 1 : 2), counted_calls_(are_long ? 2 : 6),
      rounds_(are_long ? 2 : 3), warm_up_(warm_up), first_(static_cast<uint8_t>(first)), best_(first_) {
    const auto end = known_ns.begin() + count_;
    if (count_ < 2 || std::find(known_ns.begin(), end, 0) != end) {
        compare_all();
        return;
    }
    for (int one = 0; one < count_; ++one) {
        candidates_[one].durations.add(known_ns[static_cast<size_t>(one)]);
    }
    best_ = static_cast<uint8_t>(std::min_element(known_ns.begin(), end) - known_ns.begin());
    reference_ns_ = known_ns[best_];
    settled_ = true;
    unverified_ = calls_to_verification;
}

// One trial of each, one after the other.
void Learner::compare_all() {
    ++comparisons_;
    settled_ = count_ < 2;
    to_compare_ = settled_ ? 0 : count_;
    rounds_left_ = rounds_ - 1;
    first_ = best_;
    calls_since_comparison_ = unverified_ = 0;
    is_look_ = false;
    duel_ = Duel::none;
    lately_ns_ = {};
    regret_ns_ = 0;
    suspects_ = false;
    for (Candidate &one : candidates_) {
        one = {};
    }
}

Learner::Choice Learner::next() {
    if (count_ < 2) {
        return {best_, false, false};
    }
    while (trial_left_ == 0 && !settled_ && to_compare_ > 0) {
        const int candidate = (first_ + count_ - to_compare_) % count_;
        if (!is_hopeless(candidate)) {
            begin_trial(candidate);
        }
        if (--to_compare_ == 0 && rounds_left_ > 0) {
            to_compare_ = count_;
            --rounds_left_;
        }
    }
    // Those that were left out last have no trial whose end would say that all are known.
    if (!settled_ && trial_left_ == 0 && to_compare_ == 0 && rounds_left_ == 0 && trials_ended_ == trials_begun_) {
        settle();
    }
    if (trial_left_ > 0) {
        --trial_left_;
        uncounted_left_ = skipped_calls_;
        return {tried_, trial_left_ < (is_look_ ? calls_of_look - 1 : counted_calls_), true};
    }
    const bool counts = uncounted_left_ == 0;
    uncounted_left_ -= counts ? 0 : 1;
    return {best_, counts, false};
}

// As far as is known in the middle of a comparison.
bool Learner::is_hopeless(int candidate) const {
    if (candidates_[candidate].durations.count() <= counted_calls_) {
        return false;
    }
    uint64_t least_ns = UINT64_MAX / hopeless_halves;
    for (int one = 0; one < count_; ++one) {
        const uint64_t ns = candidates_[one].durations.least();
        least_ns = ns > 0 ? std::min(least_ns, ns) : least_ns;
    }
    return 2 * candidates_[candidate].durations.least() > hopeless_halves * least_ns;
}

void Learner::begin_trial(int candidate, bool is_look, bool is_cold) {
    if (settled_ && (is_look || candidates_[candidate].wins == 0)) {
        candidates_[candidate].before_ns = typical_ns(candidate);
        candidates_[candidate].durations.clear();  // of another time
        candidates_[candidate].wins = 0;
    }
    under_trial_ = true;
    ++trials_begun_;
    tried_ = static_cast<uint8_t>(candidate);
    is_look_ = is_look;
    const int calls = is_look ? calls_of_look : skipped_calls_ + counted_calls_ + (is_cold ? warm_up_[candidate] : 0);
    trial_left_ = trial_calls_ = static_cast<uint8_t>(std::min(calls, UINT8_MAX));
    candidates_[candidate].is_paid = false;
}

// After a look at it.
bool Learner::is_worth_a_trial(int candidate, uint64_t now_ns) const {
    const uint64_t ns = candidates_[candidate].durations.least();
    const bool may_be_cold = warm_up_[candidate] > 0 && duel_ == Duel::none;
    return is_faster(ns, now_ns) || (may_be_cold && ns > 0 && ns < cold_factor * now_ns);
}

// What a look takes longer than as many calls of the best, at least one part in so many. Most looks at a candidate with
// a warm-up bring a trial.
uint64_t Learner::cost_ns_of_look(int candidate, uint64_t least_part) const {
    const uint64_t now_ns = candidates_[best_].durations.median();
    const uint64_t typical_ns = candidates_[candidate].durations.median();
    const uint64_t more_ns = std::max(typical_ns > now_ns ? typical_ns - now_ns : 0, now_ns / least_part);
    const int trial = warm_up_[candidate] > 0 ? warm_up_[candidate] + skipped_calls_ + counted_calls_ : 0;
    return (calls_of_look + static_cast<uint64_t>(trial)) * more_ns;
}

// The cores may be others than before, or less busy.
void Learner::pay_for_looks(uint64_t left_ns) {
    // Another one comes first each time, as many a sum is too small for all.
    const int begin = payments_++ % (count_ - 1);
    for (int one = 0; one < count_ - 1; ++one) {
        const int candidate = (best_ + 1 + (begin + one) % (count_ - 1)) % count_;
        const uint64_t cost_ns = cost_ns_of_look(candidate, 8);
        if (left_ns >= cost_ns) {
            left_ns -= cost_ns;
            candidates_[candidate].is_paid = true;
        }
    }
}

void Learner::observe(const Choice &choice, uint64_t duration_ns, uint32_t calls, uint64_t elapsed_ns) {
    if (count_ < 2) {
        return;
    }
    Candidate &of = candidates_[choice.candidate];
    if (choice.tries) {
        if (choice.counts && duration_ns > 0) {
            of.durations.add(duration_ns);
        }
        if (++of.arrived == trial_calls_) {
            of.arrived = 0;
            end_trial(choice.candidate);
        }
        return;
    }
    calls_since_change_ += calls;
    calls_since_comparison_ += calls;
    calls_since_looks_ += calls;
    if (duration_ns == 0) {
        suspects_ = false;  // as long as nothing is measured
    }
    if (!settled_ || choice.candidate != best_ || duration_ns == 0) {
        return;
    }
    if (unverified_ > 0 && !under_trial_) {
        unverified_ -= std::min(calls, unverified_);
        if (unverified_ == 0) {
            compare_all();
            return;
        }
    }
    const uint64_t called_ns = (calls - 1) * of.durations.median();
    const uint64_t pause_ns = elapsed_ns > called_ns ? elapsed_ns - called_ns : 0;
    // What was measured before a pause may be of another time; calls that all come after pauses are of one kind.
    const bool is_after_pause = is_long(pause_ns);
    if (is_after_pause && !was_after_pause_) {
        lately_ns_ = {};
    }
    was_after_pause_ = is_after_pause;
    if (choice.counts) {
        of.durations.add(duration_ns);
        lately_ns_[lately_at_] = duration_ns;
        lately_at_ = (lately_at_ + 1) % lately;
        if (look_for_regret(duration_ns, calls)) {
            return;
        }
        if (has_jumped()) {
            compare_all();
            return;
        }
    }
    if (is_after_pause && calls_since_looks_ >= least_calls_between_pauses) {
        calls_since_looks_ = 0;
        pay_for_looks(pause_ns / share_of_pause);
    }
    if (!under_trial_) {
        for (int one = 0; one < count_; ++one) {
            if (one != best_ && candidates_[one].is_paid) {
                begin_trial(one, true);
                return;
            }
        }
    }
    if (of.durations.count() < counted_calls_ || unverified_ > 0) {
        return;
    }
    if (reference_ns_ == 0 && of.durations.count() == Durations::most) {
        reference_ns_ = of.durations.median();
    }
    // One call that was interrupted for long pays for no trial.
    const uint64_t usual_ns = reference_ns_ == 0 ? of.durations.median() : reference_ns_;
    const uint64_t spent_ns = std::min(duration_ns, 2 * usual_ns) * calls;
    for (Candidate &one : candidates_) {
        one.credit_ns += spent_ns;
    }
    look_for_trial();
}

void Learner::end_trial(int candidate) {
    ++trials_ended_;
    if (!settled_) {
        if (to_compare_ == 0 && rounds_left_ == 0 && trials_ended_ == trials_begun_) {
            settle();
        }
        return;
    }
    under_trial_ = false;
    Candidate &of = candidates_[candidate];
    of.credit_ns = 0;
    const uint64_t now_ns = is_look_ && duel_ != Duel::none ? regretted_ns_ : candidates_[best_].durations.median();
    const bool wins = is_look_ ? is_worth_a_trial(candidate, now_ns) : is_faster(of.durations.median(), now_ns);
    if (is_look_) {
        is_look_ = false;
        const bool is_sure = duel_ == Duel::none && of.durations.count() > 1;
        if (is_sure && least_lately() > sure_factor * of.durations.upper_median() &&
            least_lately() < most_factor * of.durations.least()) {
            upset(candidate);  // no accident makes two calls so much faster
        } else if (wins) {
            begin_trial(candidate, false, true);
        } else if (duel_ != Duel::none) {
            // It has become slow as well; another may not have.
            begin_duel(fastest_other(), regretted_ns_);
        }
        return;
    }
    if (duel_ != Duel::none) {
        end_duel();
        return;
    }
    of.wins = wins ? static_cast<uint8_t>(std::min(of.wins + 1, trials_to_win)) : 0;
    if (of.wins == 0) {
        return;
    }
    if (of.wins < trials_to_win) {
        begin_trial(candidate);
    } else if (is_faster(of.durations.median(), now_ns, clear_margin)) {
        upset(candidate);
    } else if (has_jumped() || is_upset(candidate)) {
        compare_all();
    } else if (may_correct_ || calls_since_change_ >= least_calls_between_changes) {
        may_correct_ = false;
        change_to(candidate);
    }
}

// The best may take longer than before, and another not: after the hypervisor moved the cores, say. A look at the other
// is worth the time that was lost since; where it is the faster one, both have a trial, one after the other. Returns
// whether it begins.
bool Learner::look_for_regret(uint64_t duration_ns, uint32_t calls) {
    if (under_trial_) {
        return false;
    }
    const int rival = fastest_other();
    const uint64_t now_ns = least_lately();
    const uint64_t rival_ns = candidates_[rival].durations.median();
    suspects_ = is_faster(rival_ns, duration_ns, clear_margin);
    if (now_ns == 0 || !is_faster(rival_ns, now_ns, clear_margin)) {
        regret_ns_ = 0;
        return false;
    }
    regret_ns_ += (now_ns - rival_ns) * calls;
    return regret_ns_ >= calls_of_look * rival_ns && begin_duel(rival, now_ns);
}

// Of the best's last calls; 0 where these are too few to say how long it takes now.
uint64_t Learner::least_lately() const { return *std::min_element(lately_ns_.begin(), lately_ns_.end()); }

// As far as is known; the best itself where nothing is known of others.
int Learner::fastest_other() const {
    int fastest = best_;
    for (int one = 0; one < count_; ++one) {
        const uint64_t ns = candidates_[one].durations.median();
        if (one != best_ && ns > 0 && (fastest == best_ || ns < candidates_[fastest].durations.median())) {
            fastest = one;
        }
    }
    return fastest;
}

// Returns whether the rival is known to be faster, so that there is one.
bool Learner::begin_duel(int rival, uint64_t now_ns) {
    if (rival == best_ || !is_faster(candidates_[rival].durations.median(), now_ns, clear_margin)) {
        duel_ = Duel::none;
        return false;
    }
    regretted_ns_ = now_ns;
    regret_ns_ = 0;
    lately_ns_ = {};
    suspects_ = false;
    duel_ = Duel::rival;
    rival_ = static_cast<uint8_t>(rival);
    candidates_[rival].wins = 0;  // what is known of it is of another time
    begin_trial(rival, true);
    return true;
}

void Learner::end_duel() {
    if (duel_ == Duel::rival) {
        duel_ = Duel::best;
        begin_trial(best_);
        return;
    }
    duel_ = Duel::none;
    reference_ns_ = 0;
    const Durations &of_rival = candidates_[rival_].durations, &of_best = candidates_[best_].durations;
    if (is_faster(of_rival.upper_median(), of_best.median(), clear_margin)) {
        upset(rival_);
    }
}

// It is faster by far, so the cores have moved: what is known of the others is of another time.
void Learner::upset(int candidate) {
    change_to(candidate);
    ++upsets_;
    may_correct_ = true;
    pay_for_looks(UINT64_MAX);
}

// What was slower before is much faster now, so nothing that is known of the others holds.
bool Learner::is_upset(int candidate) const {
    return calls_since_comparison_ >= least_calls_between_comparisons / 2 &&
           5 * candidates_[candidate].durations.median() < 4 * candidates_[best_].durations.median();
}

void Learner::settle() {
    under_trial_ = false;
    settled_ = true;
    int fastest = first_;
    for (int one = 0; one < count_; ++one) {
        const uint64_t least_ns = candidates_[fastest].durations.median();
        if (is_faster(candidates_[one].durations.median(), least_ns == 0 ? UINT64_MAX / margin : least_ns)) {
            fastest = one;
        }
    }
    if (fastest != best_) {
        change_to(fastest);
        rest_ = least_calls_between_comparisons;
    } else {
        rest_ = std::min(2 * rest_, most_calls_between_comparisons);  // a false alarm
    }
    reference_ns_ = 0;
    calls_since_change_ = 0;
    may_correct_ = true;
    for (int one = 0; one < count_; ++one) {
        if (candidates_[one].durations.count() == 0) {
            unverified_ = calls_to_verification;  // nobody measured its trials
        }
    }
}

void Learner::change_to(int candidate) {
    best_ = static_cast<uint8_t>(candidate);
    reference_ns_ = regret_ns_ = 0;
    suspects_ = false;
    lately_ns_ = {};
    calls_since_change_ = 0;
    uncounted_left_ = skipped_calls_;
    for (Candidate &one : candidates_) {
        one.wins = 0;
    }
    ++changes_;
}

// The cores may be others than before, and what was slow then may be fast now.
bool Learner::has_jumped() const {
    if (under_trial_ || calls_since_comparison_ < rest_) {
        return false;
    }
    const uint64_t now_ns = candidates_[best_].durations.median();
    return reference_ns_ > 0 && (3 * now_ns > 4 * reference_ns_ || 4 * now_ns < 3 * reference_ns_);
}

bool Learner::look_at_all() {
    if (!settled_ || count_ < 2) {
        return true;  // all are compared, or there is no other
    }
    if (under_trial_ || calls_since_looks_ < least_calls_between_looks) {
        return false;
    }
    const uint64_t spent_ns = calls_since_looks_ * candidates_[best_].durations.median();
    calls_since_looks_ = 0;
    pay_for_looks(spent_ns / share_of_pause);
    return true;
}

void Learner::look_for_trial() {
    if (under_trial_) {
        return;
    }
    for (int after = 1; after < count_; ++after) {
        const int one = (best_ + after) % count_;
        if (candidates_[one].credit_ns / share / static_cast<uint64_t>(count_ - 1) >= cost_ns_of_look(one, 4)) {
            begin_trial(one, true);
            return;
        }
    }
}

}  // namespace shm
