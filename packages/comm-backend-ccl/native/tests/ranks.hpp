// A group whose ranks are threads, and operations with what they have to come to.

#pragma once

#include "check.hpp"
#include "progress/group.hpp"
#include "reference.hpp"

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace tests {

// Runs `body` for each rank in a thread of its own, and throws what one of them threw.
void on_ranks(int size, const std::function<void(int rank)> &body);

// One mapping for all ranks, so that ThreadSanitizer sees who else uses it.
class Segment {
public:
    explicit Segment(int size);
    ~Segment();
    Segment(const Segment &) = delete;
    void *begin() const { return begin_; }
    // This rank's side of the group, which reads from the others in this order. `oversubscribed`: whether it finds that
    // ranks share hardware threads; as they do where it is not given.
    std::unique_ptr<shm::Group> join(int rank, std::vector<int> reading_order = {},
                                     std::optional<bool> oversubscribed = {}) const;

private:
    int size_;
    size_t bytes_;
    void *begin_;
};

class World {
public:
    // `reading_orders`: one for each rank; as the group chooses where it is empty. `oversubscribed`: of each rank, as
    // of Segment::join.
    explicit World(int size, const std::vector<std::vector<int>> &reading_orders = {},
                   const std::vector<bool> &oversubscribed = {});
    int size() const { return static_cast<int>(groups_.size()); }
    shm::Group &operator[](int rank) { return *groups_[static_cast<size_t>(rank)]; }
    void close(int rank) { groups_[static_cast<size_t>(rank)].reset(); }
    void run(const std::function<void(shm::Group &)> &body);

private:
    Segment segment_;
    std::vector<std::unique_ptr<shm::Group>> groups_;
};

// An operation of a whole group. Of a message, `root` receives and `from` sends.
struct Job {
    int operation = shm::barrier, dtype = shm::float32, op = shm::sum, root = -1, from = -1;
    size_t count = 0;
    // Of all_to_all_v: what one sends to another.
    std::vector<std::vector<size_t>> counts;
    std::vector<Bytes> inputs;
    // One for each rank, or one for all; empty where a rank gets nothing.
    std::vector<Bytes> expected;

    size_t item() const { return shm::item_bytes(dtype); }
    const Bytes &expected_of(int rank) const { return expected[expected.size() == 1 ? 0 : static_cast<size_t>(rank)]; }
    bool takes_part(int rank) const { return from < 0 || rank == from || rank == root; }
};

bool is_reduction(int operation);
bool is_rooted(int operation);
std::string described(const Job &job);
// Fills in what is put in and what has to come out.
Job prepared(Job job, int size, Random &random);
// One that goes with what can be reduced: another for every `turn`.
void choose_kind(Job &job, size_t turn);

// One rank's part in a job, in memory of its own.
class Part {
public:
    // `offset` of the tensors from where they would be aligned, in elements.
    Part(const Job &job, shm::Group &group, size_t offset = 0, bool in_place = false);
    ~Part();
    Part(Part &&) = default;

    void start(bool watched = false);
    void run();
    // Waits for the end, with a limit.
    void finish();
    // Looks without waiting whether that was all.
    bool poll();
    // Says that somebody waits for it, as Python does.
    void await(uint32_t caller) const { task_->recorded.wait(caller, false); }
    const shm::Request &request() const { return request_; }

private:
    void check();
    const Job *job_;
    shm::Group *group_;
    Bytes input_, output_;
    shm::Request request_;
    shm::Handle task_;
    bool in_place_;
};

// A rank's part in each of `jobs`, one after the other.
void do_all(const std::vector<Job> &jobs, shm::Group &group);

}  // namespace tests
