// What a call is: whether it can be done, what it is to people, and whether all ranks made the same.

#include "progress/group.hpp"

#include <cerrno>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace shm {

const char *const operation_names[operations] = {"all_reduce",     "reduce",     "broadcast",    "all_gather",
                                                 "reduce_scatter", "all_to_all", "all_to_all_v", "send",
                                                 "recv",           "gather",     "scatter",      "barrier"};
const char *const dtype_names[dtypes] = {"int8",   "uint8",   "int16",   "uint16",  "int32",    "uint32", "int64",
                                         "uint64", "float16", "float32", "float64", "bfloat16", "bool"};
const char *const message_dtype_names[message_dtypes] = {"complex32",
                                                         "complex64",
                                                         "complex128",
                                                         "float8_e4m3fn",
                                                         "float8_e4m3fnuz",
                                                         "float8_e5m2",
                                                         "float8_e5m2fnuz",
                                                         "float8_e8m0fnu",
                                                         "float4_e2m1fn_x2",
                                                         "bits8",
                                                         "bits16",
                                                         "bits1x8",
                                                         "bits2x4",
                                                         "bits4x2",
                                                         "qint8",
                                                         "qint32",
                                                         "quint8",
                                                         "quint4x2",
                                                         "quint2x4",
                                                         "int1",
                                                         "int2",
                                                         "int3",
                                                         "int4",
                                                         "int5",
                                                         "int6",
                                                         "int7",
                                                         "uint1",
                                                         "uint2",
                                                         "uint3",
                                                         "uint4",
                                                         "uint5",
                                                         "uint6",
                                                         "uint7",
                                                         "bcomplex32"};
const char *const op_names[ops] = {"sum", "product", "min", "max", "avg", "band", "bor", "bxor"};

namespace {

uint32_t mixed(uint32_t before, uint64_t a, uint64_t b) {
    uint64_t hash = (before ^ a) * 0x9e3779b97f4a7c15u;
    hash = (hash ^ (hash >> 29) ^ b) * 0xbf58476d1ce4e5b9u;
    return static_cast<uint32_t>(hash >> 32);
}

std::string sized(uint64_t bytes, uint64_t dtype) {
    if (dtype < dtypes) {
        return std::to_string(bytes / item_bytes(static_cast<int>(dtype))) + " x " + dtype_names[dtype];
    }
    const uint64_t other = dtype - dtypes;
    return std::to_string(bytes) + " bytes of " +
           (other < message_dtypes ? message_dtype_names[other] : "another dtype");
}

size_t mean(const std::vector<size_t> &counts) {
    return counts.empty() ? 0 : std::accumulate(counts.begin(), counts.end(), size_t{0}) / counts.size();
}

std::string described(const Record &record) {
    const Call &call = record.call;
    if (call.operation >= operations || call.dtype >= dtypes || call.op >= ops) {
        return "something else";
    }
    std::string text = operation_names[call.operation];
    if (call.operation == barrier) {
        return text;
    }
    text += '(';
    if (call.operation != all_to_all_v) {
        text += std::to_string(call.count) + " x ";
    }
    text += dtype_names[call.dtype];
    if (is_reduction(call.operation)) {
        text += std::string(", ") + op_names[call.op];
    }
    if (call.root >= 0) {
        text += ", root " + std::to_string(call.root);
    }
    text += ')';
    const Shown &passed = record.passed;
    return passed.number == call.number ? text.append(passed.text, strnlen(passed.text, sizeof passed.text)) : text;
}

// Why the memory of a process is out of reach.
std::string obstacle(int error) {
    switch (error) {
    case ESRCH:
        return "it has ended";
    case EPERM:
    case EACCES:
        return "permission denied: its process is not dumpable, as after a change of its user id, or Yama or seccomp "
               "forbids it";
    case EMFILE:
    case ENFILE:
        return "too many files are open (ulimit -n)";
    case ENOMEM:
        return "it cannot be mapped: the address space is limited (ulimit -v unlimited lifts the limit, before the "
               "start), or too many files are mapped (vm.max_map_count)";
    default:
        return std::strerror(error);
    }
}

}  // namespace

void Group::check(const Request &request) const {
    if (request.operation >= operations || request.dtype >= dtypes) {
        throw std::invalid_argument("unknown operation or dtype");
    }
    if (is_reduction(request.operation) && !reduces(request.dtype, request.op)) {
        throw std::invalid_argument(std::string(op_names[request.op < ops ? request.op : 0]) + " of " +
                                    dtype_names[request.dtype] + " cannot be reduced");
    }
    const bool rooted = request.operation == reduce || request.operation == broadcast || request.operation == gather ||
                        request.operation == scatter || request.operation == send || request.operation == receive;
    const bool from_any = request.operation == receive && request.root == any_source;
    if (rooted && !from_any && (request.root < 0 || request.root >= size())) {
        throw std::invalid_argument("rank " + std::to_string(request.root) + " is not in a group of " +
                                    std::to_string(size()));
    }
    if ((request.operation == send || request.operation == receive) && request.root == rank_) {
        throw std::invalid_argument("a message to this rank itself");
    }
    if (request.tag < 0) {
        throw std::invalid_argument("tag " + std::to_string(request.tag) + " of a message");
    }
    const size_t ranks = static_cast<size_t>(size());
    if (request.operation == all_to_all_v &&
        (request.input_counts.size() != ranks || request.output_counts.size() != ranks)) {
        throw std::invalid_argument("all_to_all_v needs a size for each rank");
    }
}

flight::Recorded Group::record(const Request &request, bool watched) {
    const bool is_message = request.operation == send || request.operation == receive;
    called_ += is_message ? 0 : 1;
    const bool is_barrier = request.operation == barrier;
    const flight::Facts facts{
        flight::packed_kind(request.operation, is_barrier ? 0 : request.dtype, is_barrier ? 0 : request.op,
                            recorded_as_.load(std::memory_order_relaxed), watched),
        request.operation == all_to_all_v ? mean(request.input_counts) : request.count,
        is_message ? 0 : called_,
        request.root,
        request.tag,
        watched,
        request.user_call,
    };
    return flight::begin(facts);
}

Record &Group::begin(const Request &request, Call &call, uint8_t method) {
    call.number = ++number_;
    call.operation = request.operation;
    // Of a barrier, these are what a caller happened to have.
    call.dtype = request.operation == barrier ? 0 : request.dtype;
    call.op = request.operation == barrier ? 0 : request.op;
    call.root = request.root;
    call.count = request.count;
    call.method = method;
    fingerprint_ = mixed(fingerprint_,
                         call.operation | call.dtype << 8 | call.op << 16 | static_cast<uint64_t>(method) << 24 |
                             static_cast<uint64_t>(static_cast<uint32_t>(call.root)) << 32,
                         call.count);
    call.fingerprint = fingerprint_;
    Record &record = record_of(rank_, call.number);
    record.call = call;
    record.input_address = reinterpret_cast<uint64_t>(request.input);
    record.output_address = reinterpret_cast<uint64_t>(request.output);
    return record;
}

bool Group::goes_on_alike(int other, uint64_t number, size_t segment) {
    const size_t place = segment % std::size(Call{}.of_segments);
    if (record_of(other, number).call.of_segments[place] == record_of(rank_, number).call.of_segments[place]) {
        return true;
    }
    fail(different_calls, other, number);
    return false;
}

void Group::pass(const Passed &passed) {
    fingerprint_ = mixed(fingerprint_, passed.digest, 0);
    Shown &shown = record_of(rank_, number_ + 1).passed;
    shown.number = number_ + 1;
    std::strncpy(shown.text, passed.text.c_str(), sizeof shown.text);
}

void Group::fail(Failure kind, int other, uint64_t number) {
    // Ranks that only gave may have gone on after the first call that differed.
    while (kind == different_calls && number > 1) {
        const Call &mine = record_of(rank_, number - 1).call, &theirs = record_of(other, number - 1).call;
        if (mine.number != number - 1 || theirs.number != number - 1 || mine.fingerprint == theirs.fingerprint) {
            break;
        }
        --number;
    }
    uint64_t none = 0;
    header_->failure.compare_exchange_strong(none,
                                             failed_mark | static_cast<uint64_t>(kind) << 60 |
                                                 static_cast<uint64_t>(rank_) << 54 |
                                                 static_cast<uint64_t>(other) << 48 | number,
                                             std::memory_order_seq_cst);
    // Who gives up uses its tensor for something else next: whoever reads that must see the failure afterwards.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    for (int one = 0; one < size(); ++one) {
        wake(one);
    }
}

std::string Group::failure() {
    const uint64_t failure = header_->failure.load(std::memory_order_acquire);
    if (failure == 0) {
        return closed() ? "the group was destroyed" : "";
    }
    const uint64_t number = failure & ((uint64_t{1} << 48) - 1);
    const int finder = static_cast<int>(failure >> 54 & 63), other = static_cast<int>(failure >> 48 & 63);
    const auto kind = static_cast<Failure>(failure >> 60 & 7);
    if (kind == different_sizes) {
        const Difference &found = at<Difference>(layout_.differences)[finder];
        return "rank " + std::to_string(finder) + " and rank " + std::to_string(other) +
               " disagree about how much the one sends to the other: rank " + std::to_string(other) + " sends " +
               sized(found.sent_bytes, found.sent_dtype) + ", and rank " + std::to_string(finder) + " expects " +
               sized(found.expected_bytes, found.expected_dtype);
    }
    if (kind == timed_out) {
        const uint64_t missing = at<Difference>(layout_.differences)[finder].missing;
        std::string who;
        for (int one = 0; one < size(); ++one) {
            if (missing >> one & 1) {
                who += (who.empty() ? "" : ", ") + std::to_string(one);
            }
        }
        return "rank " + std::to_string(finder) + " timed out waiting for ranks [" + who + "] of the group";
    }
    if (kind == unmatched) {
        return "rank " + std::to_string(finder) + " cannot keep more than " +
               std::to_string(Inbox::most_kept_bytes >> 20) +
               " MiB of messages for which it has not called recv; rank " + std::to_string(other) +
               " sent one more. Receive messages in about the order in which they are sent";
    }
    if (kind == gave_up) {
        return "rank " + std::to_string(finder) + " gave up; its own error says why";
    }
    if (kind == no_memory) {
        return "rank " + std::to_string(finder) +
               " has not enough shared memory; its own error says how much is needed";
    }
    if (kind == unreachable) {
        return "rank " + std::to_string(finder) + " cannot reach the memory of rank " + std::to_string(other) + ": " +
               obstacle(static_cast<int>(at<Difference>(layout_.differences)[finder].error));
    }
    const auto settings_of = [&](int rank) { return at<Identity>(layout_.identities)[rank].settings; };
    if (settings_of(finder) != settings_of(other)) {
        return "rank " + std::to_string(finder) + " and rank " + std::to_string(other) +
               " have different values of CCL_SHARED_MEMORY_TRANSFER or CCL_SHARED_MEMORY_LEARNING";
    }
    const Record &theirs = record_of(other, number);
    const std::string found = described(record_of(finder, number));
    std::string text = "operation " + std::to_string(number) + " of the group is " + found + " on rank " +
                       std::to_string(finder) + " and ";
    text += theirs.call.number == number ? described(theirs) : "something else";
    text += " on rank " + std::to_string(other);
    const bool are_alike = theirs.call.number == number && described(theirs) == found;
    if (!are_alike) {
        return text;
    }
    // The sizes of tensors in one are compared, and not described.
    const bool has_joined = found.rfind(" tensors") != std::string::npos;
    return text + (has_joined ? ", whose tensors have other sizes or another order"
                              : ", which have chosen different transfers: a fault of this library");
}

}  // namespace shm
