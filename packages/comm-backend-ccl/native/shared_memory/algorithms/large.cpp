#include "algorithms/large.hpp"

#include "algorithms/eager.hpp"
#include "segment/arena.hpp"

namespace shm {

Large::Large(Group &group, Request request, bool is_chosen)
    : Stepwise(std::move(request)), operands_(group, this->request),
      is_small_(this->request.operation != all_to_all_v && input_bytes(group, this->request) <= small_bytes(group)),
      is_chosen_(is_chosen) {
    // Until plan() knows all. Step 1 may publish the first chunk, which needs a free slot.
    steps_ = posts_ = 2;
}

Large::Large(Group &group, Request request, const Call &call, uint32_t base, uint32_t first)
    : Large(group, std::move(request)) {
    begun_ = true;
    call_ = call;
    base_ = base;
    first_ = first;
    next_ = 1;
}

uint8_t Large::choose(Group &group) {
    if (request.operation == all_to_all_v) {
        group.choose_method_of_parts(request);
        pieces_ = pieces_for_parts(group, request);
        first_ = group.take_pieces(pieces_of_parts);
        return group.method().place_code();  // nobody knows yet how much the others send
    }
    bytes_ = input_bytes(group, request);
    if (!is_chosen_) {
        group.choose_method(request, bytes_, is_small_);
    }
    if (is_small_ && group.method().transfer != shm::single_copy) {
        way_ = eager;
        steps_ = exchange_steps(group, request);
        posts_ = 1;
        pieces_ = pieces_for(group, request);
        first_ = group.take_pieces(pieces_);
    }
    return group.method().code();
}

void Large::prepare(Group &group, Record &record) {
    record.input = {};
    record.largest = 0;
    if (is_small_) {
        exposed = way_ != eager;
        return;
    }
    record.input = Arena::instance().find(request.input, input_bytes(group, request));
    // Of all_reduce, ranks write into each other's input; of all_to_all, they read what others may have overwritten.
    const bool is_one_tensor = request.output == request.input;
    const bool exchanges = request.operation == all_to_all || request.operation == all_to_all_v;
    if ((request.operation == all_reduce && !is_one_tensor) || (exchanges && is_one_tensor)) {
        record.input = {};
    }
    exposed = record.input.inode != 0 || group.method().transfer == shm::single_copy;
    if (request.operation == all_to_all_v) {
        record.largest = show_sizes(group, request, call_.number);
    }
}

bool Large::needed(Group &group, uint32_t steps) {
    switch (request.operation) {
    case broadcast:
    case scatter:
        return operands_.is_root() || one_at(group, request.root, steps);
    case gather:
        return !operands_.is_root() || all_at(group, steps);
    default:
        return all_at(group, steps);
    }
}

// Whether all that read this rank's tensor have done so.
bool Large::needed_by_readers(Group &group, uint32_t steps) {
    switch (request.operation) {
    case broadcast:
    case scatter:
        return !operands_.is_root() || all_at(group, steps);
    case shm::reduce:
    case gather:
        return operands_.is_root() || one_at(group, request.root, steps);
    default:
        return all_at(group, steps);
    }
}

bool Large::ready(Group &group, uint32_t step) {
    if (step == 0) {
        return pieces_ == 0 || group.pieces_are_free(first_, pieces_, awaits);
    }
    if ((way_ == in_place || way_ == read) && step > origin_ + 1) {
        if (!needed_by_readers(group, step)) {
            return false;
        }
        // Who gave up has told so before it used its tensor for anything else. What was read of it was read before.
        std::atomic_thread_fence(std::memory_order_acquire);
        return !group.broken();
    }
    if (!needed(group, step) || (way_ == undecided && !plan(group))) {
        return false;
    }
    if (segment_ > 0 && step == origin_ + 1 && !segment_agrees(group)) {
        return false;
    }
    return way_ != in_chunks || pipelined_.is_free(group, step - origin_ - 1, awaits);
}

// Everybody's record is there; false where something does not fit.
bool Large::plan(Group &group) {
    if (request.operation == all_to_all_v) {
        if (!sizes_agree(group)) {
            return false;
        }
        const size_t most_bytes = most_parts_bytes(group, call_.number);
        group.has_seen_parts(most_bytes);
        if (most_bytes <= small_bytes(group)) {
            way_ = eager;
            steps_ = 2;
            posts_ = 1;
            return true;
        }
        for (int other = 0; other < operands_.size; ++other) {
            whole_ = std::max<size_t>(whole_, group.record_of(other, call_.number).largest);
        }
        group.tuner().ignore();
        group.tuner().end(group.steps());
        bytes_ = whole_ * operands_.parts();
        if (bytes_ > slot_bytes) {
            group.choose_method(request, bytes_, false);
            exposed = exposed || group.method().transfer == shm::single_copy;
        }
    } else {
        whole_ = operands_.total();
    }
    if (!is_small_ && zero_copy_.plan(group, operands_, call_.number)) {
        group.tuner().ignore();
        way_ = in_place;
        steps_ = ZeroCopy::steps;
        posts_ = ZeroCopy::posts;
        return !group.broken();
    }
    segments_ = Tuner::segments_of(bytes_);
    plan_segment(group);
    return true;
}

void Large::plan_segment(Group &group) {
    const auto begin = [&](size_t segment) {
        return segment == segments_ ? whole_ : whole_ / segments_ * segment / alignment * alignment;
    };
    range_ = {begin(segment_), begin(segment_ + 1)};
    const bool is_last = segment_ + 1 == segments_;
    if (group.method().transfer == shm::single_copy && SingleCopy::serves(group, operands_, call_.number)) {
        way_ = read;
        steps_ = origin_ + SingleCopy::steps(operands_);
        posts_ = origin_ + SingleCopy::posts(operands_);
    } else {
        if (group.method().transfer == shm::single_copy) {
            group.tuner().ignore();
        }
        way_ = in_chunks;
        pipelined_.plan(group, operands_, whole_, range_);
        steps_ = origin_ + pipelined_.steps();
        posts_ = origin_ + pipelined_.posts();
    }
    posts_ = is_last ? posts_ : steps_;
}

// With the ranks that were waited for.
bool Large::segment_agrees(Group &group) {
    const bool takes_from_root = request.operation == broadcast || request.operation == scatter;
    if (takes_from_root || request.operation == gather) {
        if (takes_from_root == operands_.is_root()) {
            return true;  // waited for nobody
        }
    }
    for (int other = 0; other < operands_.size; ++other) {
        const bool was_waited_for = other != operands_.me && (!takes_from_root || other == request.root);
        if (was_waited_for && !group.goes_on_alike(other, call_.number, segment_)) {
            return false;
        }
    }
    return true;
}

// Step `step`, the last one of a segment, is done and not yet posted: plans the next segment.
void Large::begin_next_segment(Group &group, uint32_t step) {
    group.tuner().end(group.steps());
    group.choose_method(request, bytes_, false);
    group.go_on(segment_ + 1, group.method().code());
    exposed = exposed || group.method().transfer == shm::single_copy;
    ++segment_;
    origin_ = step;
    plan_segment(group);
}

bool Large::sizes_agree(Group &group) {
    const int other = first_that_differs(group, request, call_.number);
    if (other >= 0) {
        const uint64_t sent = group.sizes_of(other, call_.number)[operands_.me];
        const uint64_t expected = request.output_counts[static_cast<size_t>(other)] * operands_.item;
        group.fail_over({sent, expected, request.dtype, request.dtype}, other, call_.number);
    }
    return other < 0;
}

void Large::act(Group &group, uint32_t step) {
    const bool of_parts = request.operation == all_to_all_v;
    if (step == 0 && (way_ == eager || of_parts)) {
        group.mark_pieces(first_, pieces_);
        if (!of_parts) {
            publish(group, request, base_, first_);
        } else if (parts_are_small(group, request)) {
            publish_parts(group, request, call_.number, base_, first_);
        }
    } else if (way_ == eager && of_parts) {
        consume_parts(group, request, call_.number, base_, first_);
    } else if (way_ == eager) {
        keep_own(group, request);
        consume(group, request, base_, first_);
    } else if (way_ == in_chunks && step > 0) {
        pipelined_.act(group, operands_, step - origin_ - 1);
    } else if (way_ == in_place && step == 1) {
        zero_copy_.act(group, operands_);
    } else if (way_ == read && step > origin_ && step - origin_ < SingleCopy::posts(operands_)) {
        SingleCopy::act(group, operands_, range_, call_.number, step - origin_);
    }
    if (step + 1 == steps_ && segment_ + 1 < segments_) {
        begin_next_segment(group, step);
    }
}

}  // namespace shm
