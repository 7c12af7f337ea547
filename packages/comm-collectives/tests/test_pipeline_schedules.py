"""Schedules as data, and their check by simulation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from comm_collectives.hooks import (
    check_schedule,
    forward_only,
    gpipe,
    interleaved,
    one_forward_one_backward,
    schedule_of,
)
from comm_collectives.hooks.pipeline import Compute, Exchange, Message, Schedule
from comm_utils.errors import ArgumentError, ArgumentTypeError


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, 16])
def test_schedules_complete_with_the_known_counts(ranks: int, microbatches: int) -> None:
    one = check_schedule(one_forward_one_backward(ranks, microbatches))
    assert one.peak_activations == tuple(min(ranks - rank, microbatches) for rank in range(ranks))
    assert one.messages == 2 * (ranks - 1) * microbatches
    # Narayanan et al., section 2.1: the bubble is (p - 1) / m of the ideal time.
    assert one.idle_fraction == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    all_first = check_schedule(gpipe(ranks, microbatches))
    assert all_first.peak_activations == (microbatches,) * ranks
    assert all_first.length == one.length
    assert check_schedule(forward_only(ranks, microbatches)).peak_activations == (0,) * ranks
    if microbatches % ranks == 0:
        for chunks in (1, 2, 3):
            several = check_schedule(interleaved(ranks, microbatches, chunks))
            assert several.messages == (0 if ranks == 1 else 2 * (ranks * chunks - 1) * microbatches)
            # Section 2.2: the bubble is smaller by the number of chunks.
            assert several.idle_fraction == pytest.approx((ranks - 1) / (chunks * microbatches + ranks - 1))
            check_schedule(forward_only(ranks, microbatches, chunks))


def test_any_order_that_can_complete_gets_messages_that_cannot_deadlock() -> None:
    random.seed(1)
    completed = refused = 0
    for _ in range(300):
        ranks, microbatches = random.randint(1, 4), random.randint(1, 4)
        orders = []
        for rank in range(ranks):
            order = [Compute(kind, rank, n) for n in range(microbatches) for kind in ("forward", "backward")]
            random.shuffle(order)
            order.sort(key=lambda one: (one.kind == "backward") * random.choice([1, 1, 1, -1]))
            orders.append(order)
        try:
            schedule = schedule_of(orders)
        except ArgumentError:
            with pytest.raises(ArgumentError, match="no rank can go on: rank"):
                schedule_of(orders)
            refused += 1
        else:
            check_schedule(schedule)
            completed += 1
    assert completed > 20
    assert refused > 20


def edited(schedule: Schedule, rank: int, actions: list[object]) -> Schedule:
    return replace(
        schedule, actions=tuple(tuple(actions) if one == rank else old for one, old in enumerate(schedule.actions))
    )  # type: ignore[arg-type]


def test_the_check_finds_what_is_wrong_and_names_the_ranks() -> None:
    right = gpipe(2, 2)
    first, second = map(list, right.actions)
    sends = [one for one in first if isinstance(one, Exchange)]
    there = Message("forward", 0, 0, 0, 1)

    with pytest.raises(ArgumentError, match=r"rank 0 sends activations of micro-batch 0 .* rank 1 does not receive"):
        check_schedule(edited(right, 1, [one for one in second if one != sends[0]]))
    with pytest.raises(ArgumentError, match=r"rank 1 receives activations of .* which rank 0 does not send"):
        check_schedule(edited(right, 0, [one for one in first if one != sends[0]]))
    with pytest.raises(ArgumentError, match=r"rank 0 sends activations of micro-batch 0 .* before it has computed"):
        check_schedule(edited(right, 0, [sends[0], *[one for one in first if one != sends[0]]]))
    late = [one for one in second if one != sends[0]]
    with pytest.raises(ArgumentError, match=r"rank 0 sends activations of micro-batch 0 .* where rank 1 receives"):
        check_schedule(edited(right, 1, [*late[:2], sends[0], *late[2:]]))
    with pytest.raises(ArgumentError, match="rank 1 has the forward of micro-batch 0 on stage 1 before the forward"):
        check_schedule(
            edited(right, 1, [Compute("forward", 1, 0), *[o for o in second if o != Compute("forward", 1, 0)]])
        )
    gone = (Compute("backward", 1, 1), Compute("backward", 0, 1), Exchange((Message("backward", 1, 1, 1, 0),)))
    without, other = ([one for one in actions if one not in gone] for actions in (second, first))
    with pytest.raises(ArgumentError, match="rank 0 has no backward of micro-batch 1 on stage 0"):
        check_schedule(edited(edited(right, 1, without), 0, other))
    with pytest.raises(
        ArgumentError, match="rank 0 has the forward of micro-batch 0 on stage 1; expected it on rank 1"
    ):
        check_schedule(edited(right, 0, [Compute("forward", 1, 0), *first]))
    with pytest.raises(ArgumentError, match="rank 0 has the forward of micro-batch 0 on stage 0 twice"):
        check_schedule(edited(right, 0, [Compute("forward", 0, 0), *first]))
    with pytest.raises(ArgumentError, match="rank 0 takes part in"):
        check_schedule(edited(right, 0, [Exchange((replace(there, src=1, dst=1),)), *first]))
    with pytest.raises(ArgumentTypeError, match="expected a Schedule"):
        check_schedule("1f1b")  # type: ignore[arg-type]


def test_sends_that_wait_for_each_other_are_a_deadlock() -> None:
    # Both ranks send before they receive: fine with buffers, forever without.
    there, back = Message("forward", 0, 1, 0, 1), Message("backward", 1, 0, 1, 0)
    start = [Exchange((Message("forward", 0, 0, 0, 1),))]
    zero = [Compute("forward", 0, 0), *start, Compute("forward", 0, 1), Exchange((there,)), Exchange((back,))]
    one = [*start, Compute("forward", 1, 0), Compute("backward", 1, 0), Exchange((back,)), Exchange((there,))]
    schedule = Schedule("crossed", 2, 1, 2, (tuple(zero), tuple(one)))
    with pytest.raises(ArgumentError, match=r"no rank can go on: rank 0 waits in activations .*; rank 1 waits in grad"):
        check_schedule(schedule)
    together = Exchange((there, back))
    ends = [Compute("backward", 0, 0), Compute("backward", 0, 1)], [Compute("forward", 1, 1), Compute("backward", 1, 1)]
    last = Exchange((Message("backward", 1, 1, 1, 0),))
    schedule = Schedule(
        "together", 2, 1, 2, ((*zero[:3], together, ends[0][0], last, ends[0][1]), (*one[:3], together, *ends[1], last))
    )
    assert check_schedule(schedule).peak_activations == (2, 1)


def test_wrong_numbers_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="gpipe: microbatches: got 0"):
        gpipe(2, 0)
    with pytest.raises(ArgumentTypeError, match="one_forward_one_backward: ranks: got '2'"):
        one_forward_one_backward("2", 2)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="interleaved: microbatches: got 5; expected a multiple of 2"):
        interleaved(2, 5)
    with pytest.raises(ArgumentError, match="rank 0 has the forward of micro-batch 0 on stage 0 twice"):
        schedule_of([[Compute("forward", 0, 0)] * 2])
    with pytest.raises(ArgumentError, match="rank 1 has no forward of micro-batch 1 on stage 1"):
        schedule_of([[Compute("forward", 0, 0), Compute("forward", 0, 1)], [Compute("forward", 1, 0)]])
    with pytest.raises(ArgumentError, match="expected it on rank 0"):
        schedule_of([[], [Compute("forward", 0, 0)]])
    assert gpipe(2, 2).fingerprint != gpipe(2, 3).fingerprint
    assert gpipe(2, 2) == gpipe(2, 2)
    assert str(interleaved(2, 4)) == "interleaved 1f1b of 2 ranks with 2 stages each and 4 micro-batches"
