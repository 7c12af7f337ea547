// Operations on more than fits into a slot: in chunks, of which one is shown while those before it are worked on; or on
// the tensors themselves where all of them can be reached.

#include "algorithms/eager.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace shm {

namespace {

constexpr size_t alignment = 64;
// Of an output that no cache has room for.
constexpr size_t large_bytes = 32 << 20;

size_t rounded_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

class Large final : public Stepwise {
public:
    Large(Group &group, Request request) : Stepwise(std::move(request)) {
        // Until plan() knows all. Step 1 may show the first chunk, which needs a free slot.
        steps_ = posts_ = 2;
        item_ = item_bytes(this->request.dtype);
        size_ = group.size();
        me_ = group.rank();
        // What is reduced in place was read a moment ago.
        is_large_ = this->request.operation != all_reduce && this->request.operation != shm::reduce &&
                    output_bytes() >= large_bytes;
    }

private:
    const char *input() const { return static_cast<const char *>(request.input); }
    char *output() const { return static_cast<char *>(request.output); }
    bool is_root() const { return me_ == request.root; }
    size_t output_bytes() const {
        size_t elements = request.count;
        for (const size_t part : request.output_counts) {
            elements += part;
        }
        const bool whole = request.operation == all_gather || request.operation == all_to_all ||
                           (request.operation == gather && is_root());
        return elements * item_ * (whole ? static_cast<size_t>(size_) : 1);
    }
    // Bytes of this rank's tensor that is cut into chunks, and how many parts of it a slot has room for.
    size_t total() const { return request.bytes(); }

    void prepare(Group &group, Record &record) override {
        size_t shown = input_bytes(group, request);
        for (const size_t part : request.input_counts) {
            shown += part * item_;
        }
        record.input = Arena::instance().find(request.input, shown);
        // Of all_reduce, ranks write into each other's input; of all_to_all, they read what others may have overwritten.
        const bool in_place = request.output == request.input;
        const bool exchanges = request.operation == all_to_all || request.operation == all_to_all_v;
        if ((request.operation == all_reduce && !in_place) || (exchanges && in_place)) {
            record.input = {};
        }
        exposed = record.input.inode != 0;
        record.largest = 0;
        if (request.operation == all_to_all_v) {
            uint64_t *row = group.sizes_of(me_, call_.number);
            size_t in = 0, out = 0;
            for (int other = 0; other < size_; ++other) {
                row[other] = request.input_counts[other] * item_;
                record.largest = std::max(record.largest, row[other]);
                input_offsets_.push_back(in);
                output_offsets_.push_back(out);
                in += row[other];
                out += request.output_counts[other] * item_;
            }
        }
    }

    bool needed(Group &group, uint32_t steps) {
        switch (request.operation) {
        case broadcast:
        case scatter:
            return is_root() || one_at(group, request.root, steps);
        case gather:
            return !is_root() || all_at(group, steps);
        default:
            return all_at(group, steps);
        }
    }

    bool ready(Group &group, uint32_t step) override {
        if (step == 0) {
            return true;
        }
        if (direct_ && step == 2) {
            return (request.operation == broadcast && !is_root()) || all_at(group, 2);
        }
        if (!needed(group, step) || (step == 1 && chunks_ == 0 && !direct_ && !plan(group))) {
            return false;
        }
        return direct_ || step > chunks_ || group.pieces_are_free(piece_of(step - 1), pieces_, awaits);
    }

    // Everybody's record is there; false where something does not fit.
    bool plan(Group &group) {
        if (request.operation == all_to_all_v) {
            for (int other = 0; other < size_; ++other) {
                const uint64_t sent = group.sizes_of(other, call_.number)[me_];
                const uint64_t expected = request.output_counts[other] * item_;
                if (sent != expected) {
                    group.fail_over({sent, expected, request.dtype, request.dtype}, other, call_.number);
                    return false;
                }
            }
        }
        if (is_direct(group)) {
            direct_ = true;
            steps_ = 3;
            posts_ = 2;
            return !group.broken();
        }
        size_t pieces = 1, whole = total();
        switch (request.operation) {
        case reduce_scatter:
        case all_to_all:
        case scatter:
            pieces = static_cast<size_t>(size_);
            break;
        case all_to_all_v:
            pieces = static_cast<size_t>(size_);
            whole = 0;
            for (int other = 0; other < size_; ++other) {
                whole = std::max<size_t>(whole, group.record_of(other, call_.number).largest);
            }
            break;
        default:
            break;
        }
        // Few chunks leave nothing to overlap, small ones cost more to meet over; large ones leave the caches too early.
        const size_t most = group.layout().chunk_bytes() * (whole * pieces <= group.layout().ring_bytes() ? larger_chunk : 1);
        const size_t room = most / pieces / alignment * alignment;
        chunk_ = std::min(room, std::max(rounded_up((whole + 1) / 2, alignment), size_t{16} << 10));
        chunks_ = static_cast<uint32_t>((whole + chunk_ - 1) / chunk_);
        // Each rank reduces a part, and the others take it; of two ranks each can as well reduce all, where that is quick.
        const bool by_all = size_ == 2 && request.dtype != float16 && request.dtype != bfloat16;
        stages_ = (request.operation == all_reduce && !by_all) || request.operation == reduce ? 3 : 2;
        whole_ = whole;
        const size_t piece = group.layout().piece_bytes;
        pieces_ = std::bit_ceil(static_cast<uint32_t>((chunk_ * pieces + piece - 1) / piece));
        first_ = group.take_pieces(pieces_, chunks_);
        steps_ = 1 + chunks_ + stages_ - 1;
        posts_ = steps_ - 1;
        return true;
    }

    // --- on the tensors themselves

    bool is_direct(Group &group) {
        switch (request.operation) {
        case broadcast:
            if (group.record_of(request.root, call_.number).input.inode == 0) {
                return false;
            }
            if (!is_root()) {
                reach(group, request.root);
            }
            return true;
        case all_reduce:
        case all_gather:
        case reduce_scatter:
        case all_to_all:
        case all_to_all_v:
            for (int one = 0; one < size_; ++one) {
                if (group.record_of(one, call_.number).input.inode == 0) {
                    return false;
                }
            }
            for (int one = 0; one < size_; ++one) {
                if (one != me_) {
                    reach(group, one);
                }
                // Of all_to_all_v, what is for this rank comes after what is for those before it.
                for (int before = 0; request.operation == all_to_all_v && before < me_; ++before) {
                    theirs_at_[one] += group.sizes_of(one, call_.number)[before];
                }
            }
            return true;
        default:
            return false;
        }
    }

    void reach(Group &group, int rank) {
        theirs_[rank] = group.mapped(rank, group.record_of(rank, call_.number).input);
        if (theirs_[rank] == nullptr) {
            group.fail(unreachable, rank, call_.number);
        }
    }

    void act_directly() {
        const size_t bytes = total();
        theirs_[me_] = const_cast<char *>(input());
        switch (request.operation) {
        case broadcast:
            if (!is_root()) {
                copy(output(), theirs_[request.root], bytes);
            }
            break;
        case all_gather:
            if (output() + static_cast<size_t>(me_) * bytes != input()) {
                std::memmove(output() + static_cast<size_t>(me_) * bytes, input(), bytes);
            }
            for (int one = 1; one < size_; ++one) {
                const int from = (me_ + one) % size_;
                copy(output() + static_cast<size_t>(from) * bytes, theirs_[from], bytes);
            }
            break;
        case all_to_all:
            for (int one = 0; one < size_; ++one) {
                const int from = (me_ + one) % size_;
                copy(output() + static_cast<size_t>(from) * bytes, theirs_[from] + static_cast<size_t>(me_) * bytes,
                     bytes);
            }
            break;
        case all_to_all_v:
            for (int one = 0; one < size_; ++one) {
                const int from = (me_ + one) % size_;
                copy(output() + output_offsets_[from], theirs_[from] + theirs_at_[from],
                     request.output_counts[from] * item_);
            }
            break;
        case reduce_scatter:
            reduce_from([&](int one) { return theirs_[one] + static_cast<size_t>(me_) * bytes; },
                        {output()}, request.count);
            break;
        case all_reduce: {
            const Slice mine = slice_of(request.count, me_);
            std::vector<void *> outputs;
            for (int one = 0; one < size_; ++one) {
                outputs.push_back(theirs_[(me_ + one) % size_] + mine.begin * item_);
            }
            reduce_from([&](int one) { return theirs_[one] + mine.begin * item_; }, outputs, mine.count);
            break;
        }
        }
    }

    template <class Where>
    void reduce_from(const Where &where, const std::vector<void *> &outputs, size_t count, bool streams = false) {
        const void *inputs[max_ranks];
        for (int one = 0; one < size_; ++one) {
            inputs[one] = where(one);
        }
        kernels().reduce(request.dtype, request.op, outputs.data(), static_cast<int>(outputs.size()), inputs, size_,
                         count, streams);
    }

    // Into a tensor; what is larger than the caches is better written around them.
    void copy(void *to, const void *from, size_t bytes) const {
        (is_large_ ? kernels().stream : kernels().copy)(to, from, bytes);
    }

    // --- chunk by chunk

    struct Slice {
        size_t begin, count;  // elements
    };
    // What rank `owner` reduces of `count` elements.
    Slice slice_of(size_t count, int owner) const {
        const size_t each = rounded_up((count + size_ - 1) / size_, alignment / item_);
        const size_t begin = std::min(count, each * static_cast<size_t>(owner));
        return {begin, std::min(count, begin + each) - begin};
    }
    size_t chunk_begin(uint32_t chunk) const { return static_cast<size_t>(chunk) * chunk_; }
    size_t chunk_bytes(uint32_t chunk, size_t whole) const {
        const size_t begin = chunk_begin(chunk);
        return begin >= whole ? 0 : std::min(chunk_, whole - begin);
    }
    uint32_t piece_of(uint32_t chunk) const { return (first_ + chunk % shm::pieces * pieces_) % shm::pieces; }
    char *slot(Group &group, int rank, uint32_t chunk) const { return group.piece(rank, piece_of(chunk)); }

    void act(Group &group, uint32_t step) override {
        if (step == 0) {
            return;
        }
        if (direct_) {
            if (step == 1) {
                act_directly();
            }
            return;
        }
        const uint32_t at = step - 1;
        if (at < chunks_) {
            group.mark_pieces(piece_of(at), pieces_);
            publish_chunk(group, at);
        }
        if (stages_ == 3 && at >= 1 && at - 1 < chunks_) {
            reduce_chunk(group, at - 1);
        }
        const uint32_t last = stages_ - 1;
        if (at >= last && at - last < chunks_) {
            consume_chunk(group, at - last);
        }
    }

    void publish_chunk(Group &group, uint32_t chunk) {
        char *to = slot(group, me_, chunk);
        const size_t begin = chunk_begin(chunk), bytes = chunk_bytes(chunk, whole_);
        const auto shown = [&](char *at, const char *from, size_t part) { group.writer().write(at, from, part); };
        switch (request.operation) {
        case all_reduce:
        case reduce:
            if (stages_ == 2) {
                shown(to, input() + begin, bytes);
            } else {
                const Slice mine = slice_of(bytes / item_, me_);
                const size_t from = mine.begin * item_, until = from + mine.count * item_;
                shown(to, input() + begin, from);
                shown(to + until, input() + begin + until, bytes - until);
            }
            break;
        case all_gather:
            shown(to, input() + begin, bytes);
            if (output() + static_cast<size_t>(me_) * whole_ != input()) {
                copy(output() + static_cast<size_t>(me_) * whole_ + begin, input() + begin, bytes);
            }
            break;
        case gather:
            if (is_root()) {
                copy(output() + static_cast<size_t>(me_) * whole_ + begin, input() + begin, bytes);
            } else {
                shown(to, input() + begin, bytes);
            }
            break;
        case broadcast:
            if (is_root()) {
                shown(to, input() + begin, bytes);
            }
            break;
        case scatter:
            if (!is_root()) {
                break;
            }
            [[fallthrough]];
        case reduce_scatter:
        case all_to_all:
            for (int other = 0; other < size_; ++other) {
                if (other != me_) {
                    shown(to + static_cast<size_t>(other) * chunk_,
                           input() + static_cast<size_t>(other) * whole_ + begin, bytes);
                }
            }
            break;
        case all_to_all_v:
            for (int other = 0; other < size_; ++other) {
                const size_t part = chunk_bytes(chunk, request.input_counts[other] * item_);
                if (other != me_ && part > 0) {
                    shown(to + static_cast<size_t>(other) * chunk_, input() + input_offsets_[other] + begin, part);
                }
            }
            break;
        }
    }

    void reduce_chunk(Group &group, uint32_t chunk) {
        const size_t begin = chunk_begin(chunk);
        const Slice mine = slice_of(chunk_bytes(chunk, whole_) / item_, me_);
        const size_t offset = mine.begin * item_;
        char *shown = slot(group, me_, chunk) + offset;
        std::vector<void *> outputs;
        if (request.operation == all_reduce || is_root()) {
            outputs.push_back(output() + begin + offset);
        }
        if (request.operation == all_reduce || !is_root()) {
            outputs.push_back(shown);
        }
        reduce_from(
            [&](int one) -> const void * {
                return one == me_ ? input() + begin + offset : slot(group, one, chunk) + offset;
            },
            outputs, mine.count, group.writer().streams() && outputs.size() > 1);
    }

    void consume_chunk(Group &group, uint32_t chunk) {
        const size_t begin = chunk_begin(chunk), bytes = chunk_bytes(chunk, whole_);
        switch (request.operation) {
        case reduce:
            if (!is_root()) {
                break;
            }
            [[fallthrough]];
        case all_reduce:
            if (stages_ == 2) {
                reduce_from(
                    [&](int one) -> const void * { return one == me_ ? input() + begin : slot(group, one, chunk); },
                    {output() + begin}, bytes / item_);
                break;
            }
            for (int other = 0; other < size_; ++other) {
                if (other != me_) {
                    const Slice theirs = slice_of(bytes / item_, other);
                    copy(output() + begin + theirs.begin * item_, slot(group, other, chunk) + theirs.begin * item_,
                           theirs.count * item_);
                }
            }
            break;
        case gather:
            if (!is_root()) {
                break;
            }
            [[fallthrough]];
        case all_gather:
            for (int other = 0; other < size_; ++other) {
                if (other != me_) {
                    copy(output() + static_cast<size_t>(other) * whole_ + begin, slot(group, other, chunk), bytes);
                }
            }
            break;
        case broadcast:
            if (!is_root()) {
                copy(output() + begin, slot(group, request.root, chunk), bytes);
            }
            break;
        case scatter:
            copy(output() + begin,
                   is_root() ? input() + static_cast<size_t>(me_) * whole_ + begin
                             : slot(group, request.root, chunk) + static_cast<size_t>(me_) * chunk_,
                   bytes);
            break;
        case reduce_scatter:
            reduce_from(
                [&](int one) -> const void * {
                    return one == me_ ? input() + static_cast<size_t>(me_) * whole_ + begin
                                      : slot(group, one, chunk) + static_cast<size_t>(me_) * chunk_;
                },
                {output() + begin}, bytes / item_);
            break;
        case all_to_all:
            for (int other = 0; other < size_; ++other) {
                copy(output() + static_cast<size_t>(other) * whole_ + begin,
                       other == me_ ? input() + static_cast<size_t>(me_) * whole_ + begin
                                    : slot(group, other, chunk) + static_cast<size_t>(me_) * chunk_,
                       bytes);
            }
            break;
        case all_to_all_v:
            for (int other = 0; other < size_; ++other) {
                const size_t part = chunk_bytes(chunk, request.output_counts[other] * item_);
                if (part > 0) {
                    copy(output() + output_offsets_[other] + begin,
                           other == me_ ? input() + input_offsets_[me_] + begin
                                        : slot(group, other, chunk) + static_cast<size_t>(me_) * chunk_,
                           part);
                }
            }
            break;
        }
    }

    int size_ = 0, me_ = 0;
    size_t item_ = 1, chunk_ = 0, whole_ = 0;
    uint32_t chunks_ = 0, stages_ = 2, pieces_ = 0, first_ = 0;
    bool direct_ = false, is_large_ = false;
    std::array<char *, max_ranks> theirs_{};
    std::array<size_t, max_ranks> theirs_at_{};
    std::vector<size_t> input_offsets_, output_offsets_;
};

}  // namespace

Handle make_large(Group &group, Request &&request) { return std::make_shared<Large>(group, std::move(request)); }

}  // namespace shm
