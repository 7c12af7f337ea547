#include "algorithms/large.hpp"

#include "algorithms/eager.hpp"
#include "segment/arena.hpp"

namespace shm {

Large::Large(Group &group, Request request) : Stepwise(std::move(request)), operands_(group, this->request) {
    // Until plan() knows all. Step 1 may publish the first chunk, which needs a free slot.
    steps_ = posts_ = 2;
}

void Large::prepare(Group &group, Record &record) {
    size_t exposed_bytes = input_bytes(group, request);
    for (const size_t part : request.input_counts) {
        exposed_bytes += part * operands_.item;
    }
    record.input = Arena::instance().find(request.input, exposed_bytes);
    // Of all_reduce, ranks write into each other's input; of all_to_all, they read what others may have overwritten.
    const bool in_place = request.output == request.input;
    const bool exchanges = request.operation == all_to_all || request.operation == all_to_all_v;
    if ((request.operation == all_reduce && !in_place) || (exchanges && in_place)) {
        record.input = {};
    }
    exposed = record.input.inode != 0;
    record.largest = 0;
    if (request.operation == all_to_all_v) {
        uint64_t *row = group.sizes_of(operands_.me, call_.number);
        for (int other = 0; other < operands_.size; ++other) {
            row[other] = request.input_counts[other] * operands_.item;
            record.largest = std::max(record.largest, row[other]);
        }
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

bool Large::ready(Group &group, uint32_t step) {
    if (step == 0) {
        return true;
    }
    if (way_ == zero_copy && step == 2) {
        return (request.operation == broadcast && !operands_.is_root()) || all_at(group, 2);
    }
    if (!needed(group, step) || (way_ == undecided && !plan(group))) {
        return false;
    }
    return way_ == zero_copy || pipelined_.is_free(group, step - 1, awaits);
}

// Everybody's record is there; false where something does not fit.
bool Large::plan(Group &group) {
    if (request.operation == all_to_all_v && !sizes_agree(group)) {
        return false;
    }
    if (zero_copy_.plan(group, operands_, call_.number)) {
        way_ = zero_copy;
        steps_ = ZeroCopy::steps;
        posts_ = ZeroCopy::posts;
        return !group.broken();
    }
    pipelined_.plan(group, operands_, call_.number);
    way_ = pipelined;
    steps_ = pipelined_.steps();
    posts_ = pipelined_.posts();
    return true;
}

bool Large::sizes_agree(Group &group) {
    for (int other = 0; other < operands_.size; ++other) {
        const uint64_t sent = group.sizes_of(other, call_.number)[operands_.me];
        const uint64_t expected = request.output_counts[other] * operands_.item;
        if (sent != expected) {
            group.fail_over({sent, expected, request.dtype, request.dtype}, other, call_.number);
            return false;
        }
    }
    return true;
}

void Large::act(Group &group, uint32_t step) {
    if (step == 0) {
        return;
    }
    if (way_ == pipelined) {
        pipelined_.act(group, operands_, step - 1);
    } else if (step == 1) {
        zero_copy_.act(operands_);
    }
}

}  // namespace shm
