#include "tuning/tuner.hpp"

#include "progress/group.hpp"
#include "segment/peer_memory.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <new>
#include <string>

namespace shm {

namespace {

int64_t now_ns() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// By which methods are compared. The wide ring puts up to 2 MiB of the program's own data out of the caches, and is in
// no cache itself after the program has used them; calls back to back show neither. So it counts as a quarter slower
// than it is, and has to take a fifth less time. `ns_of` gives back exactly what `cost_of` was given.
uint64_t cost_of(const Method &method, uint64_t ns) { return method.ring == RingSize::wide ? ns + ns / 4 : ns; }
uint64_t ns_of(const Method &method, uint64_t cost) { return method.ring == RingSize::wide ? cost - cost / 5 : cost; }

// Of collectives in which some ranks give and others take, whether this one gives.
bool gives(int operation, bool is_root) { return operation == broadcast || operation == scatter ? is_root : !is_root; }

}  // namespace

Tuner::Tuner(int size, int rank, const std::vector<int> &pids, Identity *identities, CallTimes *call_times,
             size_t wide_ring_bytes, Settings settings)
    : size_(size), rank_(rank), settings_(settings), pids_(pids), identities_(identities), call_times_(call_times),
      mark_(static_cast<uint64_t>(now_ns()) << 6 | static_cast<uint64_t>(rank)), wide_ring_bytes_(wide_ring_bytes),
      classes_(operations * size_classes * 4) {
    Identity &mine = identities_[rank];
    mine.mark = mark_;
    mine.address = reinterpret_cast<uint64_t>(&mark_);
    mine.settings = settings_.code();
}

void Tuner::fix(Transfer transfer, RingSize ring) {
    settings_.transfer = transfer;
    fixed_ring_ = ring;
    ring_of_small_ = ring == RingSize::wide ? ring : RingSize::usual;
    streams_small_ = transfer == streamed;
}

void Tuner::start_from(std::vector<Prior> priors) {
    priors_ = std::move(priors);
    for (Tried &one : tried_) {
        one.learner = nullptr;
    }
    for (std::unique_ptr<Class> &one : classes_) {
        one.reset();
    }
    active_ = false;
}

Method Tuner::begin(const Request &request, size_t bytes, bool is_eager, uint64_t steps) {
    active_ = timed_ = false;
    if (settings_.transfer < 0 && has_probed_all_ && (settings_.learns || !priors_.empty())) {
        Class &found = class_of(request, bytes, is_eager);
        if (settings_.learns) {
            return follow(found, request, bytes, is_eager, steps);
        }
        const bool known = found.learner.has_settled();
        return found.methods.all[known ? static_cast<size_t>(found.learner.best()) : 0];
    }
    begin_call(steps);
    const Methods methods = methods_for(request.operation, size_, request.dtype, is_eager, can_read_);
    const Method *fixed = nullptr;
    for (int one = 0; one < methods.count; ++one) {
        const Method &method = methods.all[static_cast<size_t>(one)];
        const bool is_better = fixed == nullptr || (fixed_ring_ != RingSize::usual && method.ring == fixed_ring_);
        fixed = method.transfer == settings_.transfer && is_better ? &method : fixed;
    }
    return fixed == nullptr ? methods.all[0] : *fixed;
}

std::unique_ptr<Tuner::Class> &Tuner::class_at(int operation, size_t size_class, bool narrow, bool is_eager) {
    return classes_[((static_cast<size_t>(operation) * size_classes + size_class) * 2 + narrow) * 2 + is_eager];
}

Tuner::Class &Tuner::class_of(const Request &request, size_t bytes, bool is_eager) {
    // Moving bytes takes as long whatever they are of.
    const bool narrow = is_reduction(request.operation) && (request.dtype == float16 || request.dtype == bfloat16);
    const size_t size_class = std::min<size_t>(static_cast<size_t>(std::bit_width(bytes)), size_classes - 1);
    std::unique_ptr<Class> &found = class_at(request.operation, size_class, narrow, is_eager);
    if (!found) {
        const Methods methods = methods_for(request.operation, size_, request.dtype, is_eager, can_read_);
        Known kind{};
        kind.operation = request.operation;
        kind.least_bytes = size_class == 0 ? 1 : size_t{1} << (size_class - 1);
        kind.narrow = narrow;
        kind.is_eager = is_eager;
        Learner::Calls warm_up{};
        for (int one = 0; one < methods.count; ++one) {
            const size_t calls = wide_ring_bytes_ / std::max<size_t>(1, shown_bytes(request, bytes));
            const bool is_wide = methods.all[static_cast<size_t>(one)].ring == RingSize::wide;
            warm_up[static_cast<size_t>(one)] = static_cast<uint8_t>(is_wide ? std::min<size_t>(calls, UINT8_MAX) : 0);
        }
        found = std::make_unique<Class>(methods, bytes >= long_bytes, known_for(methods, kind), warm_up);
        found->upsets = upsets_;
    }
    return *found;
}

// Of all ranks' parts of its tensor, a rank keeps its own for itself.
size_t Tuner::shown_bytes(const Request &request, size_t bytes) const {
    return is_cut(request.operation) ? bytes - bytes / static_cast<size_t>(std::max(2, size_)) : bytes;
}

// Of the nearest size that is known, in proportion; nothing where that is more than a few times as large or as small.
Learner::Nanoseconds Tuner::known_for(const Methods &methods, const Known &kind) {
    constexpr int farthest = 2;  // powers of two
    const auto distance = [&](const Prior &prior) {
        return std::abs(static_cast<int>(std::bit_width(prior.least_bytes)) -
                        static_cast<int>(std::bit_width(kind.least_bytes)));
    };
    const Prior *nearest = nullptr;
    for (const Prior &prior : priors_) {
        if (prior.operation == kind.operation && prior.narrow == kind.narrow && prior.is_eager == kind.is_eager &&
            distance(prior) <= (nearest == nullptr ? farthest : distance(*nearest) - 1)) {
            nearest = &prior;
        }
    }
    if (nearest == nullptr) {
        return known_of_segments(methods, kind);
    }
    Learner::Nanoseconds found{};
    for (const Prior &prior : priors_) {
        for (int one = 0; one < methods.count; ++one) {
            if (prior.operation == kind.operation && prior.narrow == kind.narrow && prior.is_eager == kind.is_eager &&
                prior.least_bytes == nearest->least_bytes &&
                prior.method == methods.all[static_cast<size_t>(one)].name()) {
                const double factor = static_cast<double>(kind.least_bytes) / static_cast<double>(prior.least_bytes);
                const double ns =
                    static_cast<double>(prior.ns) * factor / static_cast<double>(segments_of(kind.least_bytes));
                found[static_cast<size_t>(one)] =
                    std::max<uint64_t>(1, cost_of(methods.all[static_cast<size_t>(one)], static_cast<uint64_t>(ns)));
            }
        }
    }
    return found;
}

// Of calls in segments, which are about as long whatever the size of the call: from the nearest size that has settled.
Learner::Nanoseconds Tuner::known_of_segments(const Methods &methods, const Known &kind) {
    constexpr int farthest = 2;  // powers of two
    if (segments_of(kind.least_bytes) == 1) {
        return {};
    }
    const int size_class = static_cast<int>(std::bit_width(kind.least_bytes));
    for (const int distance : {-1, 1, -farthest, farthest}) {
        const int other = size_class + distance;
        if (other >= static_cast<int>(size_classes) || segments_of(size_t{1} << (other - 1)) == 1) {
            continue;
        }
        const Class *found = class_at(kind.operation, static_cast<size_t>(other), kind.narrow, kind.is_eager).get();
        if (found != nullptr && found->learner.has_settled() && found->methods.count == methods.count) {
            Learner::Nanoseconds ns{};
            for (int one = 0; one < methods.count; ++one) {
                ns[static_cast<size_t>(one)] = found->learner.typical_ns(one);
            }
            return ns;
        }
    }
    return {};
}

Tuner::Class::Class(const Methods &methods, bool are_long, const Learner::Nanoseconds &known_ns,
                    const Learner::Calls &warm_ups)
    : methods(methods), learner(methods.count, 0, are_long, known_ns, warm_ups) {
    for (int one = 0; one < methods.count; ++one) {
        if (const uint32_t calls = warm_ups[static_cast<size_t>(one)]; calls > 0) {
            warmed_up = one;
            warm_up = calls;
        }
    }
}

Method Tuner::follow(Class &of, const Request &request, size_t bytes, bool is_eager, uint64_t steps) {
    if (of.comparisons != of.learner.comparisons()) {
        of.comparisons = of.learner.comparisons();
        of.warm_up_left = of.warm_up;
    }
    if (of.warm_up_left > 0 && !of.learner.has_settled()) {
        --of.warm_up_left;
        return of.methods.all[static_cast<size_t>(of.warmed_up)];
    }
    ++of.unseen;
    if (of.learner.is_steady() && of.unseen < seen_one_in(bytes)) {
        return of.methods.all[static_cast<size_t>(of.learner.best())];
    }
    Tried &tried = begin_call(steps);
    // Where the cores have moved, other choices have become wrong as well.
    if (of.upsets != upsets_ && of.learner.look_at_all()) {
        of.upsets = upsets_;
    }
    const Learner::Choice choice = of.learner.next();
    tried = {&of.learner, choice,    of.methods.all[choice.candidate], request.operation, request.root, is_eager,
             of.unseen,   UINT64_MAX};
    of.unseen = 0;
    active_ = timed_ = true;
    begun_ns_ = now_ns();
    timed_class_ = &of;
    return tried.method;
}

// A call from which others learn, or that gets them so far; what was learned from others comes first.
Tuner::Tried &Tuner::begin_call(uint64_t steps) {
    const uint64_t call = calls_++;
    const auto is_known = [&](uint64_t earlier) {
        const uint64_t ended_at = tried_[earlier % tried_.size()].ended_at;
        return call - earlier >= lag || (ended_at < steps && steps - ended_at > slots);
    };
    while (learned_ < call && is_known(learned_)) {
        learn(learned_++);
    }
    // Nobody is more than `slots` steps behind. A group counts its steps from `slots`, not from 0.
    if (probed_at_ == 0) {
        if (steps > 2 * slots) {
            probe();
            probed_at_ = steps;
        }
    } else if (!has_probed_all_ && steps - probed_at_ > slots) {
        has_probed_all_ = can_read_ = true;
        for (int one = 0; one < size_; ++one) {
            can_read_ = can_read_ && identities_[one].reads.load(std::memory_order_relaxed) == Identity::can_read;
        }
    }
    Tried &tried = tried_[call % tried_.size()];
    tried = {};
    return tried;
}

std::vector<Tuner::Known> Tuner::known() const {
    std::vector<Known> found;
    for (size_t index = 0; index < classes_.size(); ++index) {
        if (!classes_[index]) {
            continue;
        }
        const Class &of = *classes_[index];
        const size_t size_class = index / 4 % size_classes;
        Known one{static_cast<int>(index / 4 / size_classes),
                  size_t{1} << (size_class == 0 ? 0 : size_class - 1),
                  index / 2 % 2 == 1,
                  index % 2 == 1,
                  of.methods.all[static_cast<size_t>(of.learner.best())],
                  of.learner.has_settled(),
                  of.learner.changes(),
                  {}};
        for (int candidate = 0; candidate < of.methods.count; ++candidate) {
            const Method &method = of.methods.all[static_cast<size_t>(candidate)];
            one.typical_ns.emplace_back(method,
                                        ns_of(method, of.learner.typical_ns(candidate)) * segments_of(one.least_bytes));
        }
        found.push_back(std::move(one));
    }
    return found;
}

void Tuner::end(uint64_t steps) {
    if (active_) {
        tried_[(calls_ - 1) % tried_.size()].ended_at = steps;
        // The next word that this rank posts comes after it.
        const int64_t ended_ns = now_ns(), before_ns = timed_class_->ended_ns;
        const auto took = static_cast<uint64_t>(std::max<int64_t>(ended_ns - begun_ns_, 1));
        const auto elapsed = static_cast<uint64_t>(before_ns == 0 ? 0 : std::max<int64_t>(begun_ns_ - before_ns, 0));
        const size_t slot = (calls_ - 1) % CallTimes::kept;
        call_times_[rank_].ns[slot].store(timed_ ? took : 0, std::memory_order_relaxed);
        call_times_[rank_].elapsed_ns[slot].store(elapsed, std::memory_order_relaxed);
        timed_class_->ended_ns = ended_ns;
        active_ = false;
    }
}

bool Tuner::reads_peers() const {
    for (int one = 0; one < size_; ++one) {
        uint64_t mark = 0;
        if (one != rank_ &&
            !(read_peer(pids_[one], &mark, identities_[one].address, sizeof(mark)) && mark == identities_[one].mark)) {
            return false;
        }
    }
    return true;
}

void Tuner::probe() {
    const bool can = reads_peers();
    if (can) {
        scratch_.reset(new (std::nothrow) char[static_cast<size_t>(size_) * scratch_bytes]);
    }
    identities_[rank_].reads.store(can && scratch_ ? Identity::can_read : Identity::cannot_read,
                                   std::memory_order_relaxed);
}

uint64_t Tuner::duration(int rank, uint64_t call) const {
    return call_times_[rank].ns[call % CallTimes::kept].load(std::memory_order_relaxed);
}

// Who came last waited least, so the least duration says how long the data took. Where some ranks give and others take,
// neither side alone does.
uint64_t Tuner::duration(const Tried &tried, uint64_t call) const {
    uint64_t least[2] = {UINT64_MAX, UINT64_MAX};
    const bool one_sided = tried.root >= 0;
    for (int one = 0; one < size_; ++one) {
        uint64_t &side = least[one_sided && gives(tried.operation, one == tried.root) ? 1 : 0];
        side = std::min(side, duration(one, call));
    }
    return one_sided ? std::max(least[0], least[1]) : least[0];
}

void Tuner::learn(uint64_t call) {
    const Tried &tried = tried_[call % tried_.size()];
    if (tried.learner == nullptr) {
        return;
    }
    const uint64_t elapsed_ns = call_times_[0].elapsed_ns[call % CallTimes::kept].load(std::memory_order_relaxed);
    const uint32_t upsets = tried.learner->upsets();
    tried.learner->observe(tried.choice, cost_of(tried.method, duration(tried, call)), tried.calls, elapsed_ns);
    upsets_ += tried.learner->upsets() - upsets;
    if (tried.small && tried.learner->has_settled()) {
        // Of larger calls, whose parts may differ by a little for another reason.
        const Learner &learner = *tried.learner;
        const uint64_t best_ns = learner.typical_ns(learner.best()), usual_ns = learner.typical_ns(0);
        if (best_ns > 0 && usual_ns > 0) {
            streams_small_ = learner.best() == 1 && 5 * best_ns < 4 * usual_ns;
            // Its cost has the margin of a fifth already.
            ring_of_small_ = learner.best() == 2 && best_ns < usual_ns ? RingSize::wide : RingSize::usual;
        }
    }
}

}  // namespace shm
