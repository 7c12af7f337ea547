#include "algorithms/eager.hpp"

#include "algorithms/large.hpp"
#include "kernels/kernels.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

namespace shm {

namespace {

constexpr bool needs_root(int operation) { return operation == broadcast || operation == scatter; }
constexpr bool only_root_needs(int operation) { return operation == reduce || operation == gather; }

bool waits(const Group &group, const Request &request) {
    if (needs_root(request.operation)) {
        return group.rank() != request.root;
    }
    return !only_root_needs(request.operation) || group.rank() == request.root;
}

}  // namespace

size_t small_bytes(const Group &group) {
    // Each rank reads the parts of all others.
    const size_t most = group.layout().chunk_bytes();
    return std::min(most, std::max(size_t{4096}, most / static_cast<size_t>(std::max(1, group.size() - 1))));
}

namespace {

// What a rank shows of its input: of one with a part for each rank, those of the others, one after the other.
size_t shown_bytes(const Group &group, const Request &request) {
    return input_bytes(group, request) - (is_cut(request.operation) ? request.bytes() : 0);
}
// Where in that the part for rank `to` begins.
size_t part_shown(const Request &request, int by, int to) {
    return static_cast<size_t>(to < by ? to : to - 1) * request.bytes();
}

}  // namespace

uint32_t pieces_for(const Group &group, const Request &request) {
    const size_t bytes = shown_bytes(group, request), piece = group.layout().piece_bytes;
    return bytes <= slot_bytes ? 0 : std::bit_ceil(static_cast<uint32_t>((bytes + piece - 1) / piece));
}

namespace {

// Where a rank shows its part.
char *place(Group &group, const Request &request, int rank, uint32_t step, uint32_t first) {
    return shown_bytes(group, request) <= slot_bytes ? group.slot(rank, step) : group.piece(rank, first);
}

}  // namespace

size_t input_bytes(const Group &group, const Request &request) {
    switch (request.operation) {
    case reduce_scatter:
    case all_to_all:
    case scatter:
        return request.bytes() * static_cast<size_t>(group.size());
    case barrier:
        return 0;
    case all_to_all_v:
        return std::accumulate(request.input_counts.begin(), request.input_counts.end(), size_t{0}) *
               item_bytes(request.dtype);
    default:
        return request.bytes();
    }
}

namespace {

// Not worth a choice of how to copy it.
constexpr size_t tiny_bytes = 1 << 10;

}  // namespace

void publish(Group &group, const Request &request, uint32_t step, uint32_t first) {
    const int operation = request.operation;
    if (operation == barrier || (needs_root(operation) && group.rank() != request.root) ||
        (only_root_needs(operation) && group.rank() == request.root)) {
        return;
    }
    // A tensor without elements may have no address.
    if (const size_t bytes = shown_bytes(group, request); bytes > 0) {
        char *to = place(group, request, group.rank(), step, first);
        const auto *from = static_cast<const char *>(request.input);
        const auto write = [&](char *at, const char *part, size_t part_bytes) {
            if (part_bytes > tiny_bytes) {
                group.write(at, part, part_bytes);
            } else if (part_bytes > 0) {
                std::memcpy(at, part, part_bytes);
            }
        };
        const size_t before = is_cut(operation) ? static_cast<size_t>(group.rank()) * request.bytes() : bytes;
        write(to, from, before);
        write(to + before, from + before + request.bytes(), bytes - before);
    }
}

// The own part may lie where another's goes, or overlap where it goes itself.
void keep_own(const Group &group, const Request &request) {
    const size_t bytes = request.bytes(), mine = static_cast<size_t>(group.rank()) * bytes;
    auto *output = static_cast<char *>(request.output);
    const auto *input = static_cast<const char *>(request.input);
    if (bytes == 0) {
        return;
    }
    switch (request.operation) {
    case all_gather:
        std::memmove(output + mine, input, bytes);
        break;
    case gather:
        if (group.rank() == request.root) {
            std::memmove(output + mine, input, bytes);
        }
        break;
    case scatter:
        if (group.rank() == request.root) {
            std::memmove(output, input + mine, bytes);
        }
        break;
    case all_to_all:
        std::memmove(output + mine, input + mine, bytes);
        break;
    default:
        break;
    }
}

void consume(Group &group, const Request &request, uint32_t step, uint32_t first) {
    const int size = group.size(), me = group.rank();
    const size_t bytes = request.bytes(), mine = static_cast<size_t>(me) * bytes;
    if (bytes == 0) {
        return;
    }
    auto *output = static_cast<char *>(request.output);
    const void *inputs[max_ranks];
    const auto shown = [&](int rank) { return place(group, request, rank, step, first); };
    switch (request.operation) {
    case all_reduce:
    case reduce: {
        void *outputs[] = {output};
        for (int one = 0; one < size; ++one) {
            inputs[one] = one == me ? request.input : shown(one);
        }
        kernels().reduce(request.dtype, request.op, outputs, 1, inputs, size, request.count, false);
        break;
    }
    case reduce_scatter: {
        void *outputs[] = {output};
        for (int one = 0; one < size; ++one) {
            inputs[one] =
                one == me ? static_cast<const char *>(request.input) + mine : shown(one) + part_shown(request, one, me);
        }
        kernels().reduce(request.dtype, request.op, outputs, 1, inputs, size, request.count, false);
        break;
    }
    case broadcast:
        std::memcpy(output, shown(request.root), bytes);
        break;
    case scatter:
        if (me != request.root) {
            std::memcpy(output, shown(request.root) + part_shown(request, request.root, me), bytes);
        }
        break;
    case all_gather:
    case gather:
        for (const int from : group.reading_order()) {
            std::memcpy(output + static_cast<size_t>(from) * bytes, shown(from), bytes);
        }
        break;
    case all_to_all:
        for (const int from : group.reading_order()) {
            std::memcpy(output + static_cast<size_t>(from) * bytes, shown(from) + part_shown(request, from, me), bytes);
        }
        break;
    default:
        break;
    }
}

bool parts_are_small(const Group &group, const Request &request) {
    return input_bytes(group, request) <= small_bytes(group);
}

uint32_t pieces_for_parts(const Group &group, const Request &request) {
    const size_t bytes = input_bytes(group, request);
    return bytes <= slot_bytes || bytes > small_bytes(group) ? 0 : pieces_of_parts;
}

uint64_t show_sizes(Group &group, const Request &request, uint64_t number) {
    uint64_t *row = group.sizes_of(group.rank(), number), largest = 0;
    for (size_t other = 0; other < request.input_counts.size(); ++other) {
        row[other] = request.input_counts[other] * item_bytes(request.dtype);
        largest = std::max(largest, row[other]);
    }
    return largest;
}

namespace {

uint64_t bytes_shown(Group &group, int rank, uint64_t number, int until) {
    const uint64_t *row = group.sizes_of(rank, number);
    return std::accumulate(row, row + until, uint64_t{0});
}

}  // namespace

size_t most_parts_bytes(Group &group, uint64_t number) {
    uint64_t most = 0;
    for (int one = 0; one < group.size(); ++one) {
        most = std::max(most, bytes_shown(group, one, number, group.size()));
    }
    return most;
}

int first_that_differs(Group &group, const Request &request, uint64_t number) {
    for (int other = 0; other < group.size(); ++other) {
        const uint64_t expected = request.output_counts[static_cast<size_t>(other)] * item_bytes(request.dtype);
        if (group.sizes_of(other, number)[group.rank()] != expected) {
            return other;
        }
    }
    return -1;
}

namespace {

// Where in a tensor the part of one rank begins.
size_t part_begins(const Request &request, const std::vector<size_t> &counts, int rank) {
    return std::accumulate(counts.begin(), counts.begin() + rank, size_t{0}) * item_bytes(request.dtype);
}

}  // namespace

namespace {

// Where a rank shows the parts of the others, one after the other. Pieces are as many for all ranks; in the wide ring,
// the bytes that were written longest ago are the next.
char *place_of_parts(Group &group, int rank, size_t bytes, size_t own, uint64_t number, uint32_t step, uint32_t first) {
    if (bytes <= slot_bytes) {
        return group.slot(rank, step);
    }
    if (first >= pieces) {
        return group.piece(rank, first);
    }
    constexpr uint64_t blocks = pieces / pieces_of_parts;
    const size_t each = (std::max<size_t>(bytes - own, 1) + line - 1) / line * line;
    return group.piece(rank, first) + number / blocks % (group.layout().chunk_bytes() / each) * each;
}

}  // namespace

// Without this rank's own part.
void publish_parts(Group &group, const Request &request, uint64_t number, uint32_t step, uint32_t first) {
    const size_t bytes = input_bytes(group, request), me = static_cast<size_t>(group.rank());
    const size_t begin = part_begins(request, request.input_counts, group.rank());
    const size_t end = begin + request.input_counts[me] * item_bytes(request.dtype);
    char *to = place_of_parts(group, group.rank(), bytes, end - begin, number, step, first);
    const auto *from = static_cast<const char *>(request.input);
    if (begin > 0) {
        group.write(to, from, begin);
    }
    if (end < bytes) {
        group.write(to + begin, from + end, bytes - end);
    }
}

void consume_parts(Group &group, const Request &request, uint64_t number, uint32_t step, uint32_t first) {
    const int me = group.rank();
    const size_t item = item_bytes(request.dtype), own = request.output_counts[static_cast<size_t>(me)] * item;
    auto *output = static_cast<char *>(request.output);
    // Its own first: others' parts may go where it lies.
    if (own > 0) {
        std::memmove(output + part_begins(request, request.output_counts, me),
                     static_cast<const char *>(request.input) + part_begins(request, request.input_counts, me), own);
    }
    for (const int from : group.reading_order()) {
        const size_t bytes = request.output_counts[static_cast<size_t>(from)] * item;
        if (bytes > 0) {
            const size_t all = bytes_shown(group, from, number, group.size());
            const size_t kept = group.sizes_of(from, number)[from];
            const char *shown = place_of_parts(group, from, all, kept, number, step, first);
            std::memcpy(output + part_begins(request, request.output_counts, from),
                        shown + bytes_shown(group, from, number, me) - (from < me ? kept : 0), bytes);
        }
    }
}

uint32_t exchange_steps(const Group &group, const Request &request) {
    const bool root_takes = request.operation == scatter && group.rank() == request.root;
    return waits(group, request) || root_takes ? 2 : 1;
}

Exchange::Exchange(Group &group, Request request) : Stepwise(std::move(request)) {
    posts_ = 1;
    steps_ = exchange_steps(group, this->request);
}

Exchange::Exchange(Group &group, Request request, const Call &call, uint32_t base, uint32_t first)
    : Exchange(group, std::move(request)) {
    begun_ = true;
    call_ = call;
    base_ = base;
    first_ = first;
    next_ = 1;
    has_own_ = true;
}

bool Exchange::ready(Group &group, uint32_t step) {
    if (step == 0) {
        return true;
    }
    if (needs_root(request.operation)) {
        return group.rank() == request.root || one_at(group, request.root, 1);
    }
    return all_at(group, 1);
}

void Exchange::act(Group &group, uint32_t step) {
    if (step == 0) {
        publish(group, request, base_, first_);
    } else {
        if (!has_own_) {
            keep_own(group, request);
        }
        consume(group, request, base_, first_);
    }
}

// More takes so long (20 us and above) that other threads should run meanwhile.
constexpr size_t at_once_bytes = 128 << 10;

// Of an operation that has begun: without this rank's next step, the others would wait for it.
template <class Make>
void Group::queue_at_once(const Make &make, const flight::Recorded &recorded, Handle &left) {
    Handle task;
    try {
        task = make();
        task->recorded = recorded;
        collectives_.push_back(task);
    } catch (...) {
        recorded.end(true);
        fail(no_memory, rank_, number_);
        throw;
    }
    advance_all();
    if (task->now() != complete) {
        left = std::move(task);
    }
}

bool Group::run_at_once(Request &request, int looks, Handle &left) {
    if (request.operation == send || request.operation == receive || input_bytes(*this, request) > small_bytes(*this) ||
        shown_bytes(*this, request) > at_once_bytes || !lock_.try_lock()) {
        return false;
    }
    const std::lock_guard<std::mutex> alone(lock_, std::adopt_lock);
    if (!collectives_.empty() || under_way_ > 0 || closed() || !free_at(done_) || broken()) {
        return false;
    }
    if (request.operation == all_to_all_v) {
        return exchange_at_once(request, looks, left);
    }
    const uint32_t taken = pieces_for(*this, request), base = done_;
    uint32_t first = 0, needed;
    uint8_t method = 0;
    if (taken > 0) {
        if (!ring_is_reserved() || !pieces_are_free(next_pieces(taken, false), taken, needed) ||
            !pieces_are_free(next_pieces(taken, true), taken, needed)) {
            return false;
        }
        method = choose_method(request, input_bytes(*this, request), true).code();
        if (method_.transfer == single_copy) {
            const flight::Recorded recorded = record(request, false);
            queue_at_once([&] { return std::make_shared<Large>(*this, std::move(request), true); }, recorded, left);
            return true;
        }
        first = take_pieces(taken);
        mark_pieces(first, taken);
    } else {
        choose_usual_method();
    }
    const flight::Recorded recorded = record(request, false);
    Call call;
    begin(request, call, method);
    publish(*this, request, base, first);
    post(call.fingerprint);
    keep_own(*this, request);
    if (needs_root(request.operation) || only_root_needs(request.operation)) {
        looks = 0;
    }
    for (int look = 0; look < looks; ++look) {
        if (all_have_come(base + 1, call, base)) {
            has_found();
            consume(*this, request, base, first);
            recorded.end(false);
            tuner_.end(steps_);
            return true;
        }
        if (relax()) {
            break;
        }
    }
    queue_at_once([&] { return std::make_shared<Exchange>(*this, std::move(request), call, base, first); }, recorded,
                  left);
    return true;
}

void Group::choose_method_of_parts(const Request &request) {
    if (parts_bytes_ > slot_bytes && parts_bytes_ <= small_bytes(*this)) {
        choose_method(request, parts_bytes_, true);
    } else {
        choose_usual_method();
    }
}

void Group::has_seen_parts(size_t most_bytes) {
    if (std::bit_width(most_bytes) != std::bit_width(parts_bytes_)) {
        tuner_.ignore();
    }
    parts_bytes_ = most_bytes;
}

bool Group::exchange_at_once(Request &request, int looks, Handle &left) {
    const uint32_t base = done_, written = pieces_for_parts(*this, request);
    uint32_t needed;
    if (!ring_is_reserved() ||
        (written > 0 && (!pieces_are_free(next_pieces(pieces_of_parts, false), written, needed) ||
                         !pieces_are_free(next_pieces(pieces_of_parts, true), written, needed)))) {
        return false;
    }
    choose_method_of_parts(request);
    const uint32_t first = take_pieces(pieces_of_parts);
    mark_pieces(first, written);
    const flight::Recorded recorded = record(request, false);
    Call call;
    Record &own = begin(request, call, method_.place_code());
    own.input = {};
    own.largest = show_sizes(*this, request, call.number);
    publish_parts(*this, request, call.number, base, first);
    post(call.fingerprint);
    for (int look = 0; look < looks; ++look) {
        if (all_have_come(base + 1, call, base)) {
            const size_t most_bytes = most_parts_bytes(*this, call.number);
            if (most_bytes > small_bytes(*this) || first_that_differs(*this, request, call.number) >= 0) {
                break;
            }
            has_found();
            has_seen_parts(most_bytes);
            consume_parts(*this, request, call.number, base, first);
            recorded.end(false);
            tuner_.end(steps_);
            return true;
        }
        if (relax()) {
            break;
        }
    }
    queue_at_once([&] { return std::make_shared<Large>(*this, std::move(request), call, base, first); }, recorded,
                  left);
    return true;
}

Handle Group::run(Request &&request, int looks) {
    check(request);
    Handle task;
    if (!run_at_once(request, looks, task)) {
        task = start(std::move(request), false);
    }
    return task && task->now() == complete ? nullptr : task;
}

}  // namespace shm
