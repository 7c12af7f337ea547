// A small operation: every rank publishes its part at once, and consumes those of the others.

#pragma once

#include "algorithms/stepwise.hpp"

namespace shm {

// Up to here the input of a rank is published at once, and nothing else has to be agreed.
size_t small_bytes(const Group &group);
// The pieces of the ring that this takes; 0 where a slot has room for it.
uint32_t pieces_for(const Group &group, const Request &request);

// The bytes that a rank publishes.
size_t input_bytes(const Group &group, const Request &request);
// Copies this rank's part to where others read it, at step `step`, in a slot or in pieces from `first`.
void publish(Group &group, const Request &request, uint32_t step, uint32_t first);
// Moves what a rank gets from itself, once and before consume(): best while others' parts are on their way.
void keep_own(const Group &group, const Request &request);
// Computes the rest of the result, when those that it needs have published theirs.
void consume(Group &group, const Request &request, uint32_t step, uint32_t first);

// Of all_to_all_v, whose parts have sizes that only their rank knows before it shows them: whether a rank publishes at
// once depends on its own part, so they are consumed so only where all ranks did. The pieces are taken in any case.
constexpr uint32_t pieces_of_parts = pieces_of_chunk;
bool parts_are_small(const Group &group, const Request &request);
// The pieces of `pieces_of_parts` that are written.
uint32_t pieces_for_parts(const Group &group, const Request &request);
// Says in the records of operation `number` how much each rank gets. Returns the largest of these, in bytes.
uint64_t show_sizes(Group &group, const Request &request, uint64_t number);
// The most that a rank sends in operation `number`, when all have shown their sizes.
size_t most_parts_bytes(Group &group, uint64_t number);
// The rank that sends something else than this one expects; -1 for none.
int first_that_differs(Group &group, const Request &request, uint64_t number);
void publish_parts(Group &group, const Request &request, uint64_t number, uint32_t step, uint32_t first);
void consume_parts(Group &group, const Request &request, uint64_t number, uint32_t step, uint32_t first);

// How many steps an exchange takes on this rank.
uint32_t exchange_steps(const Group &group, const Request &request);

// One whose parts fit into slots, or that has begun.
class Exchange final : public Stepwise {
public:
    explicit Exchange(Group &group, Request request);
    // One whose part was published at step `base`, in a slot or in pieces from `first`, and whose own was kept.
    Exchange(Group &group, Request request, const Call &call, uint32_t base, uint32_t first);

private:
    bool ready(Group &group, uint32_t step) override;
    void act(Group &group, uint32_t step) override;

    uint32_t first_ = 0;
    bool has_own_ = false;
};

}  // namespace shm
