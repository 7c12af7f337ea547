#include "ranks.hpp"

#include <sys/mman.h>
#include <unistd.h>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

namespace tests {

using namespace shm;

namespace {

constexpr size_t guard = 64;  // bytes behind an output that have to stay
constexpr char guard_byte = 0x5a;

}  // namespace

void on_ranks(int size, const std::function<void(int)> &body) {
    std::vector<std::thread> threads;
    std::mutex alone;
    std::exception_ptr first;
    for (int rank = 0; rank < size; ++rank) {
        threads.emplace_back([&, rank] {
            try {
                body(rank);
            } catch (...) {
                const std::lock_guard<std::mutex> held(alone);
                first = first ? first : std::current_exception();
            }
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    if (first) {
        std::rethrow_exception(first);
    }
}

Segment::Segment(int size) : size_(size), bytes_(Layout(size).end) {
    // Of 64 ranks hardly any page is ever written.
    begin_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(begin_ != MAP_FAILED, bytes_ << " bytes");
}

Segment::~Segment() { munmap(begin_, bytes_); }

std::unique_ptr<Group> Segment::join(int rank, std::vector<int> reading_order,
                                     std::optional<bool> oversubscribed) const {
    const std::vector<int> pids(static_cast<size_t>(size_), getpid());
    const bool are_oversubscribed = static_cast<unsigned>(size_) > std::thread::hardware_concurrency();
    return std::make_unique<Group>(begin_, -1, size_, rank, pids, oversubscribed.value_or(are_oversubscribed), false,
                                   std::move(reading_order), size_t{1} << 20);
}

World::World(int size, const std::vector<std::vector<int>> &reading_orders, const std::vector<bool> &oversubscribed)
    : segment_(size) {
    for (int rank = 0; rank < size; ++rank) {
        const auto at = static_cast<size_t>(rank);
        groups_.push_back(
            segment_.join(rank, reading_orders.empty() ? std::vector<int>{} : reading_orders[at],
                          oversubscribed.empty() ? std::nullopt : std::optional<bool>(oversubscribed[at])));
    }
}

void World::run(const std::function<void(Group &)> &body) {
    on_ranks(size(), [&](int rank) { body((*this)[rank]); });
}

bool is_reduction(int operation) {
    return operation == all_reduce || operation == shm::reduce || operation == reduce_scatter;
}

bool is_rooted(int operation) {
    return operation == shm::reduce || operation == broadcast || operation == gather || operation == scatter;
}

std::string described(const Job &job) {
    std::ostringstream text;
    text << "operation " << job.operation << ", " << job.count << " of dtype " << job.dtype << ", op " << job.op
         << ", root " << job.root << ", from " << job.from;
    return text.str();
}

void choose_kind(Job &job, size_t turn) {
    job.dtype = static_cast<int>(turn % dtypes);
    job.op = sum;
    for (size_t tries = turn / dtypes + turn; is_reduction(job.operation); ++tries) {
        job.op = static_cast<int>(tries % ops);
        if (reduces(job.dtype, job.op)) {
            return;
        }
    }
}

Job prepared(Job job, int size, Random &random) {
    const size_t ranks = static_cast<size_t>(size), bytes = job.count * job.item();
    job.inputs.assign(ranks, {});
    job.expected.assign(ranks, {});
    const bool of_all = job.operation == reduce_scatter || job.operation == all_to_all || job.operation == scatter;
    for (size_t one = 0; one < ranks; ++one) {
        size_t count = of_all ? job.count * ranks : job.count;
        if (job.operation == all_to_all_v) {
            count = 0;
            for (const size_t to : job.counts[one]) {
                count += to;
            }
        }
        const bool only_root = job.operation == broadcast || job.operation == scatter;
        const bool puts_in = job.from >= 0
                                 ? static_cast<int>(one) == job.from
                                 : job.operation != barrier && (!only_root || static_cast<int>(one) == job.root);
        job.inputs[one].resize(puts_in ? count * job.item() : 0);
        fill(job.inputs[one].data(), job.dtype, puts_in ? count : 0, random);
    }
    std::vector<const void *> inputs;
    for (const Bytes &input : job.inputs) {
        inputs.push_back(input.data());
    }
    const auto root = static_cast<size_t>(job.root);
    const auto part_of = [&](size_t from, size_t part) { return job.inputs[from].data() + part * bytes; };
    switch (job.operation) {
    case all_reduce:
        job.expected.resize(1);
        job.expected[0].resize(bytes);
        reduce(job.dtype, job.op, job.expected[0].data(), inputs, job.count);
        break;
    case shm::reduce:
        job.expected[root].resize(bytes);
        reduce(job.dtype, job.op, job.expected[root].data(), inputs, job.count);
        break;
    case reduce_scatter:
        for (size_t one = 0; one < ranks; ++one) {
            for (size_t from = 0; from < ranks; ++from) {
                inputs[from] = part_of(from, one);
            }
            job.expected[one].resize(bytes);
            reduce(job.dtype, job.op, job.expected[one].data(), inputs, job.count);
        }
        break;
    case broadcast:
        job.expected.assign(1, job.inputs[root]);
        break;
    case send:
        job.expected[root] = job.inputs[static_cast<size_t>(job.from)];
        break;
    case all_gather:
    case gather: {
        Bytes all;
        for (const Bytes &input : job.inputs) {
            all.insert(all.end(), input.begin(), input.end());
        }
        if (job.operation == all_gather) {
            job.expected.resize(1);
        }
        job.expected[job.operation == gather ? root : 0] = std::move(all);
        break;
    }
    case scatter:
    case all_to_all:
        for (size_t one = 0; one < ranks; ++one) {
            for (size_t from = job.operation == scatter ? root : 0; from < ranks; ++from) {
                job.expected[one].insert(job.expected[one].end(), part_of(from, one), part_of(from, one) + bytes);
                if (job.operation == scatter) {
                    break;
                }
            }
        }
        break;
    case all_to_all_v:
        for (size_t from = 0; from < ranks; ++from) {
            const char *at = job.inputs[from].data();
            for (size_t to = 0; to < ranks; ++to) {
                const size_t part = job.counts[from][to] * job.item();
                job.expected[to].insert(job.expected[to].end(), at, at + part);
                at += part;
            }
        }
        break;
    }
    return job;
}

Part::Part(const Job &job, Group &group, size_t offset, bool in_place) : job_(&job), group_(&group) {
    const int me = group.rank();
    const Bytes &input = job.inputs[static_cast<size_t>(me)], &expected = job.expected_of(me);
    const size_t skipped = offset * job.item();
    input_.resize(skipped);
    input_.insert(input_.end(), input.begin(), input.end());
    // A broadcast is always of one tensor.
    in_place_ =
        job.operation == broadcast || (in_place && is_reduction(job.operation) && job.operation != reduce_scatter);
    if (in_place_) {
        input_.resize(skipped + std::max(expected.size(), input.size()));
    }
    input_.resize(input_.size() + guard, guard_byte);
    output_.resize(skipped + expected.size());
    output_.resize(output_.size() + guard, guard_byte);

    request_.operation = static_cast<uint8_t>(job.operation == send && me == job.root ? receive : job.operation);
    request_.dtype = static_cast<uint8_t>(job.dtype);
    request_.op = static_cast<uint8_t>(job.op);
    request_.root = job.operation == send && me == job.root ? job.from : job.root;
    request_.count = job.count;
    // One that puts in nothing, or gets nothing, need not have a tensor.
    request_.input = input.empty() && !in_place_ ? nullptr : input_.data() + skipped;
    request_.output = in_place_ ? input_.data() + skipped : expected.empty() ? nullptr : output_.data() + skipped;
    if (job.operation == all_to_all_v) {
        request_.input_counts = job.counts[static_cast<size_t>(me)];
        for (const auto &row : job.counts) {
            request_.output_counts.push_back(row[static_cast<size_t>(me)]);
        }
    }
}

Part::~Part() {
    // What a failed test leaves under way uses this memory; the process ends soon.
    if (task_ && task_->now() == pending) {
        new Bytes(std::move(input_)), new Bytes(std::move(output_));
    }
}

void Part::start(bool watched) { task_ = group_->start(request_, watched); }
void Part::run() { task_ = group_->run(Request(request_), group_->spins()); }

bool Part::poll() { return !task_ || group_->wait(*task_, 0) != pending; }

void Part::finish() {
    const int state = task_ ? group_->wait(*task_, options.patience) : static_cast<int>(complete);
    CHECK(state == complete, "rank " << group_->rank() << " of " << group_->size() << ": state " << state << " after "
                                     << described(*job_) << "; " << group_->failure());
    CHECK(!task_ || !task_->watched || task_->ended_ns.load() > 0, "no end of " << described(*job_));
    check();
}

void Part::check() {
    const Bytes &expected = job_->expected_of(group_->rank());
    const char *found = static_cast<const char *>(request_.output);
    const size_t count = expected.size() / job_->item(), at = difference(job_->dtype, found, expected.data(), count);
    CHECK(at == count, "rank " << group_->rank() << " of " << group_->size() << ", element " << at << " of " << count
                               << ": " << shown(job_->dtype, found, at) << " instead of "
                               << shown(job_->dtype, expected.data(), at) << "; " << described(*job_));
    for (const Bytes *bytes : {&input_, &output_}) {
        for (size_t i = bytes->size() - guard; i < bytes->size(); ++i) {
            CHECK((*bytes)[i] == guard_byte, "written behind a tensor; " << described(*job_));
        }
    }
    const Bytes &input = job_->inputs[static_cast<size_t>(group_->rank())];
    CHECK(in_place_ || input.empty() || std::memcmp(request_.input, input.data(), input.size()) == 0,
          "the input changed; " << described(*job_));
}

void do_all(const std::vector<Job> &jobs, Group &group) {
    size_t turn = 0;
    for (const Job &job : jobs) {
        ++turn;
        if (!job.takes_part(group.rank())) {
            continue;
        }
        Part part(job, group, (turn + static_cast<size_t>(group.rank())) % 4, turn % 3 == 0);
        if (turn % 2 == 0) {
            part.start();
        } else {
            part.run();
        }
        part.finish();
    }
}

}  // namespace tests
