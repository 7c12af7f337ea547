"""A schedule of collectives and one fault, made from a seed: the same one for the ranks, the model and a replay."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["FAULTS", "OPERATIONS", "Schedule", "Step", "make_schedule"]

#: Every rank waits for every other in each of them.
OPERATIONS = ("all_reduce", "all_gather", "all_to_all_single", "barrier")
#: Of rank ``culprit`` before step ``at``, or in it.
FAULTS = ("killed", "exits", "raises", "late", "differs")
_BACKENDS = ("gloo", "oneccl", "shm")
_SUBGROUPS = ((0, 1), (1, 2), (0, 2), (0, 1, 2))
_WORLD_SIZE = 3


@dataclass(frozen=True)
class Step:
    """One collective: of which group, and which operation."""

    group: int
    operation: str


@dataclass(frozen=True)
class Schedule:
    """What the ranks do, in this order.

    Attributes:
        seed: it was made from.
        backend: as in cells.
        groups: their ranks; the first is the world.
        steps: all of them; the members of a step's group take part.
        fault: one of ``FAULTS``.
        culprit: whose it is.
        at: number of the step; the culprit is a member of its group.
    """

    seed: int
    backend: str
    groups: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    fault: str
    culprit: int
    at: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.groups[0])

    @property
    def dies(self) -> bool:
        """True where the culprit ends."""
        return self.fault in ("killed", "exits", "raises")


def make_schedule(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    rng = random.Random(seed)
    backend, fault = _BACKENDS[seed % len(_BACKENDS)], FAULTS[seed // len(_BACKENDS) % len(FAULTS)]
    world = tuple(range(_WORLD_SIZE))
    groups = (world, *rng.sample(_SUBGROUPS, 2))
    culprit = rng.randrange(_WORLD_SIZE)
    at = rng.randrange(1, 8)
    theirs = [place for place, ranks in enumerate(groups) if culprit in ranks]
    broken = rng.choice(theirs)
    before = [Step(rng.randrange(len(groups)), rng.choice(OPERATIONS)) for _ in range(at)]
    after = [Step(rng.randrange(len(groups)), rng.choice(OPERATIONS)) for _ in range(6)]
    if fault == "late":  # how the others' waiting and the late rank's overlap is not said elsewhere
        after = [step for step in after if step.group == broken or step.group not in theirs]
    # A call that differs has values of another length; a barrier has none.
    operation = "all_reduce" if fault == "differs" else rng.choice(OPERATIONS)
    return Schedule(seed, backend, groups, (*before, Step(broken, operation), *after), fault, culprit, at)
