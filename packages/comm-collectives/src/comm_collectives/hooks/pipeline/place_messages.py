"""The messages that a given order of passes takes, placed so that ranks cannot wait for one another forever.

The passes are simulated in ticks: in each, every rank computes its next pass if its inputs are there. What the passes
of a tick produced travels at the end of the tick, in one exchange of sender and receiver. All exchanges of a tick
complete once all ranks have come to them, and every rank takes ticks in the same order, so a wait always ends, also
where a message leaves only when its receiver takes it.
"""

from __future__ import annotations

from comm_collectives.hooks.pipeline.actions import BACKWARD, FORWARD, Action, Compute, Exchange, Message, Schedule
from comm_utils.errors import ArgumentError

__all__ = ["needs", "with_messages"]


def with_messages(name: str, chunks: int, orders: list[list[Compute]]) -> Schedule:
    """Return the schedule of ``orders`` with messages.

    Raises:
        ArgumentError: no rank can go on, or a pass is missing, duplicate or on another rank.
    """
    ranks = len(orders)
    stages = ranks * chunks
    _check_passes(orders, stages)
    done: set[Compute] = set()
    arrived: list[set[Compute]] = [set() for _ in orders]
    next_place = [0] * ranks
    actions: list[list[Action]] = [[] for _ in orders]
    while any(place < len(order) for place, order in zip(next_place, orders, strict=True)):
        computed = []
        for rank, order in enumerate(orders):
            if next_place[rank] < len(order):
                one = order[next_place[rank]]
                if all(needed in arrived[rank] for needed in needs(one, stages)):
                    computed.append((rank, one))
        if not computed:
            waiting = [
                f"rank {rank} waits before the {order[next_place[rank]]}"
                for rank, order in enumerate(orders)
                if next_place[rank] < len(order)
            ]
            raise ArgumentError(
                f"schedule {name!r}: no rank can go on: {'; '.join(waiting)}; change the order of passes"
            )
        exchanges: list[list[Message]] = [[] for _ in orders]
        for rank, one in computed:
            next_place[rank] += 1
            actions[rank].append(one)
            done.add(one)
            arrived[rank].add(one)
            message = _message(one, rank, ranks, stages)
            if message is not None:
                arrived[message.dst].add(one)
                if message.dst != rank:
                    exchanges[rank].append(message)
                    exchanges[message.dst].append(message)
        for rank, messages in enumerate(exchanges):
            if messages:
                actions[rank].append(Exchange(tuple(messages)))
    microbatches = 1 + max((one.microbatch for order in orders for one in order), default=-1)
    return Schedule(name, ranks, chunks, microbatches, tuple(map(tuple, actions)))


def needs(one: Compute, stages: int) -> list[Compute]:
    """Return the passes whose results ``one`` takes, on this rank or another."""
    if one.kind == FORWARD:
        return [Compute(FORWARD, one.stage - 1, one.microbatch)] if one.stage else []
    own = [Compute(FORWARD, one.stage, one.microbatch)]
    return own if one.stage == stages - 1 else [*own, Compute(BACKWARD, one.stage + 1, one.microbatch)]


def _message(one: Compute, rank: int, ranks: int, stages: int) -> Message | None:
    """Return what carries the result of ``one`` to where it is needed; None where it ends there."""
    target = one.stage + 1 if one.kind == FORWARD else one.stage - 1
    if not 0 <= target < stages:
        return None
    return Message(one.kind, one.stage, one.microbatch, rank, target % ranks)


def _check_passes(orders: list[list[Compute]], stages: int) -> None:
    """Check that each stage has each pass once, on its rank, and that all stages have the same micro-batches."""
    found: set[Compute] = set()
    for rank, order in enumerate(orders):
        for one in order:
            if one.kind not in (FORWARD, BACKWARD) or not 0 <= one.stage < stages or one.microbatch < 0:
                raise ArgumentError(f"schedule: rank {rank} has the {one}; expected stages 0 to {stages - 1}")
            if one.stage % len(orders) != rank:
                raise ArgumentError(
                    f"schedule: rank {rank} has the {one}; expected it on rank {one.stage % len(orders)}"
                )
            if one in found:
                raise ArgumentError(f"schedule: rank {rank} has the {one} twice; expected it once")
            found.add(one)
    for kind in (FORWARD, BACKWARD):
        if kind == BACKWARD and not any(one.kind == BACKWARD for one in found):
            return  # forward only
        microbatches = 1 + max((one.microbatch for one in found), default=-1)
        for stage in range(stages):
            for number in range(microbatches):
                if Compute(kind, stage, number) not in found:
                    raise ArgumentError(
                        f"schedule: rank {stage % len(orders)} has no {Compute(kind, stage, number)}; expected each "
                        "pass once"
                    )
