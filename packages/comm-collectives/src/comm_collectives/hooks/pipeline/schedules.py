"""Schedules as data: GPipe, 1F1B and interleaved 1F1B.

- GPipe: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019.
- 1F1B, interleaved or not: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
  Megatron-LM", 2021, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from comm_collectives.hooks.pipeline.actions import BACKWARD, FORWARD, Compute, Schedule
from comm_collectives.hooks.pipeline.place_messages import with_messages
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = ["forward_only", "gpipe", "interleaved", "one_forward_one_backward", "schedule_of"]


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Return the schedule with all forward passes before all backward passes.

    Every rank keeps the activations of all micro-batches.

    Args:
        ranks: size of the pipeline group.
        microbatches: number of parts of a batch.

    Raises:
        ArgumentError: one of them is less than 1.
    """
    _check("gpipe", ranks=ranks, microbatches=microbatches)
    orders = [
        [Compute(kind, rank, number) for kind in (FORWARD, BACKWARD) for number in range(microbatches)]
        for rank in range(ranks)
    ]
    return schedule_of(orders, "gpipe")


def one_forward_one_backward(ranks: int, microbatches: int) -> Schedule:
    """Return the 1F1B schedule: after some forward passes, a rank alternates forward and backward passes.

    Rank r keeps the activations of at most ``ranks - r`` micro-batches.

    Args:
        ranks: size of the pipeline group.
        microbatches: number of parts of a batch.

    Raises:
        ArgumentError: one of them is less than 1.
    """
    _check("one_forward_one_backward", ranks=ranks, microbatches=microbatches)
    orders = []
    for rank in range(ranks):
        forward = [Compute(FORWARD, rank, number) for number in range(microbatches)]
        backward = [Compute(BACKWARD, rank, number) for number in range(microbatches)]
        orders.append(_alternating(forward, backward, ranks - rank - 1))
    return schedule_of(orders, "1f1b")


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Return the interleaved 1F1B schedule: every rank has several stages, so that ranks wait less.

    Args:
        ranks: size of the pipeline group.
        microbatches: number of parts of a batch; a multiple of ``ranks``.
        chunks: number of stages of each rank.

    Raises:
        ArgumentError: one of them is less than 1, or ``microbatches`` is no multiple of ``ranks``.
    """
    _check("interleaved", ranks=ranks, microbatches=microbatches, chunks=chunks)
    if microbatches % ranks:
        raise ArgumentError(
            f"interleaved: microbatches: got {microbatches}; expected a multiple of {ranks}, the number of ranks"
        )
    total, round_size = microbatches * chunks, ranks * chunks
    orders = []
    for rank in range(ranks):
        forward, backward = [], []
        for place in range(total):
            turn, within = divmod(place, round_size)
            chunk, number = within // ranks, turn * ranks + within % ranks
            forward.append(Compute(FORWARD, chunk * ranks + rank, number))
            backward.append(Compute(BACKWARD, (chunks - 1 - chunk) * ranks + rank, number))
        warm_up = (ranks - rank - 1) * 2 + (chunks - 1) * ranks
        orders.append(_alternating(forward, backward, warm_up))
    return schedule_of(orders, "interleaved 1f1b", chunks)


def forward_only(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return the schedule without backward passes, for evaluation.

    Args:
        ranks: size of the pipeline group.
        microbatches: number of parts of a batch.
        chunks: number of stages of each rank.

    Raises:
        ArgumentError: one of them is less than 1.
    """
    _check("forward_only", ranks=ranks, microbatches=microbatches, chunks=chunks)
    orders = [
        [
            Compute(FORWARD, chunk * ranks + rank, number)
            for first in range(0, microbatches, ranks)
            for chunk in range(chunks)
            for number in range(first, min(first + ranks, microbatches))
        ]
        for rank in range(ranks)
    ]
    return schedule_of(orders, "forward only", chunks)


def schedule_of(orders: Sequence[Sequence[Compute]], name: str = "own", chunks: int = 1) -> Schedule:
    """Return the schedule in which each rank computes in the given order, with the messages that this takes.

    Messages are placed so that no rank waits forever, whatever the order is, if that is possible at all.

    Args:
        orders: the passes of each rank, in order.
        name: for messages.
        chunks: number of stages of each rank; stage s is on rank s modulo the number of ranks.

    Raises:
        ArgumentError: ranks would wait for one another forever, or a pass is missing, duplicate or on another rank.
        ArgumentTypeError: ``orders`` are no sequences of :class:`Compute`.
    """
    _check("schedule_of", chunks=chunks)
    expected = "expected a list for each rank with passes such as Compute('forward', stage=0, microbatch=0)"
    if not isinstance(orders, (list, tuple)):
        raise ArgumentTypeError(f"schedule_of: orders: got {shown(orders)}; {expected}")
    for rank, order in enumerate(orders):
        if not isinstance(order, (list, tuple)):
            raise ArgumentTypeError(f"schedule_of: orders[{rank}]: got {shown(order)}; {expected}")
        for place, one in enumerate(order):
            if not isinstance(one, Compute):
                raise ArgumentTypeError(f"schedule_of: orders[{rank}][{place}]: got {shown(one)}; {expected}")
            if not isinstance(one.stage, int) or not isinstance(one.microbatch, int):
                raise ArgumentTypeError(
                    f"schedule_of: orders[{rank}][{place}]: got {one!r}; expected integers as stage and microbatch"
                )
    return with_messages(name, chunks, [list(order) for order in orders])


def _alternating(forward: list[Compute], backward: list[Compute], warm_up: int) -> list[Compute]:
    """Return ``warm_up`` forward passes, then forward and backward passes in turns, then what remains."""
    warm_up = min(warm_up, len(forward))
    order = forward[:warm_up]
    for ahead, behind in zip(forward[warm_up:], backward, strict=False):
        order += [ahead, behind]
    return order + backward[len(forward) - warm_up :]


def _check(call: str, **numbers: object) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ArgumentTypeError(f"{call}: {name}: got {shown(value)}; expected an integer of 1 or more")
        if value < 1:
            raise ArgumentError(f"{call}: {name}: got {value}; expected an integer of 1 or more")
