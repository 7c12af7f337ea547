// How each operation is done, in steps.

#pragma once

#include "progress/group.hpp"

namespace shm {

// Up to here the input of a rank is shown at once, and nothing else has to be agreed.
size_t small_bytes(const Group &group);
// The pieces of the ring that this takes; 0 where a slot has room for it.
uint32_t pieces_for(const Group &group, const Request &request);

// The bytes that a rank shows to the others.
size_t input_bytes(const Group &group, const Request &request);
// The first half of what a small operation is: shows this rank's part at step `step`, in pieces from `first`.
void publish(Group &group, const Request &request, uint32_t step, uint32_t first);
// The second half, when those that it needs have shown theirs.
void consume(Group &group, const Request &request, uint32_t step, uint32_t first);

// Steps of which each may wait for other ranks.
class Stepwise : public Task {
public:
    using Task::Task;
    bool advance(Group &group) final;

protected:
    // Says who is waited for before step `step`; a step below `posts_` is followed by a post.
    virtual bool ready(Group &group, uint32_t step) = 0;
    virtual void act(Group &group, uint32_t step) = 0;
    virtual void prepare(Group &, Record &) {}
    bool all_at(Group &group, uint32_t steps);
    bool one_at(Group &group, int rank, uint32_t steps);

    Call call_;
    uint32_t base_ = 0, next_ = 0, steps_ = 0, posts_ = 0;
    bool begun_ = false;
};

// A small operation: everyone shows its part at once.
class Exchange final : public Stepwise {
public:
    explicit Exchange(Group &group, Request request);
    // One whose part was shown at step `base`, in a slot or in pieces from `first`.
    Exchange(Group &group, Request request, const Call &call, uint32_t base, uint32_t first);

private:
    void prepare(Group &group, Record &record) override;
    bool ready(Group &group, uint32_t step) override;
    void act(Group &group, uint32_t step) override;

    uint32_t pieces_ = 0, first_ = 0;
};

Handle make_large(Group &group, Request &&request);
Handle make_message(Group &group, Request &&request);

}  // namespace shm
