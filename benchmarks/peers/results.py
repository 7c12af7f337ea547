"""What was measured, and how it compares with what was asked for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from measuring import KIB, MIB, named

from peers.tasks import OTHERS, SHORT_TYPES, SIZES_BYTES, Task

__all__ = ["DEEPSPEED", "MPIS", "TARGETS", "Results", "Target", "Verdict", "row"]

MPIS = ("Open MPI", "MPICH", "Intel MPI")
DEEPSPEED = ("DeepSpeed",)
GLOO = ("gloo",)
# All that counts; rows of persistent requests are shown only.
PEERS = ("oneCCL", *MPIS, *DEEPSPEED, *GLOO)
ORDER = ("ours", *PEERS)


def row(peer: str, way: str) -> str:
    return f"{peer}, {way}" if way else peer


@dataclass
class Results:
    """µs of each timed loop's calls: task (with no way) -> row -> times; and why a peer does not do a task."""

    times_us: dict[Task, dict[str, list[float]]] = field(default_factory=dict)
    unsupported: dict[tuple[Task, str], str] = field(default_factory=dict)

    def add(self, task: Task, peer: str, times_us: Iterable[float]) -> None:
        rows = self.times_us.setdefault(task.by(""), {})
        rows.setdefault(row(peer, task.way), []).extend(times_us)

    def median_us(self, task: Task, name: str) -> float | None:
        found = self.times_us.get(task, {}).get(name)
        return statistics.median(found) if found else None

    def min_us(self, task: Task, name: str) -> float | None:
        return min(self.times_us.get(task, {}).get(name, []), default=None)

    def rows(self, tasks: Sequence[Task]) -> list[str]:
        """The rows of some tasks, in one order everywhere; those of one peer side by side."""
        found = dict.fromkeys(name for task in tasks for name in self.times_us.get(task, {}))
        return sorted(found, key=lambda name: ORDER.index(name.partition(",")[0]))

    def fastest(self, task: Task, peers: Sequence[str]) -> tuple[float, str] | None:
        medians = [(median_us, name) for name in peers if (median_us := self.median_us(task, name)) is not None]
        return min(medians, default=None)

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                **{name: value for name, value in vars(task).items() if name != "way"},
                "row": name,
                "median_us": statistics.median(times_us),
                "min_us": min(times_us),
                "times_us": times_us,
            }
            for task, rows in self.times_us.items()
            for name, times_us in rows.items()
        ]


@dataclass(frozen=True)
class Verdict:
    """``got_us`` beside what it may be at most, at the size where that is hardest; None where it was not measured."""

    target: Target
    task: Task | None = None
    got_us: float | None = None
    bound_us: float | None = None
    beside: str = ""
    #: Sizes that were measured, of all that the target is for.
    measured: int = 0

    @property
    def met(self) -> bool | None:
        return None if self.got_us is None or self.bound_us is None else self.got_us <= self.bound_us

    def to_json(self) -> dict[str, Any]:
        where = {"size_bytes": self.task.size_bytes, "dtype": self.task.dtype} if self.task else {}
        figures = {"got_us": self.got_us, "bound_us": self.bound_us, "beside": self.beside, "met": self.met}
        return {"target": self.target.text, "must": self.target.must, **where, **figures}


@dataclass(frozen=True)
class Target:
    """The median of ``row`` is at most ``factor`` times that of the fastest of ``peers``, and ``more_us``."""

    text: str
    row: str
    peers: tuple[str, ...]
    factor: float
    tasks: tuple[Task, ...]
    more_us: float = 0.0
    must: bool = True

    def judge(self, results: Results) -> Verdict:
        found = []
        for task in self.tasks:
            got_us, fastest = results.median_us(task, self.row), results.fastest(task, self.peers)
            if got_us is None or (self.peers and fastest is None):
                continue
            fastest_us, name = fastest or (0.0, "")
            found.append((got_us / (self.factor * fastest_us + self.more_us), task, got_us, fastest_us, name))
        if not found:
            return Verdict(self)
        _, task, got_us, fastest_us, name = max(found, key=lambda one: one[0])
        return Verdict(self, task, got_us, self.factor * fastest_us + self.more_us, name, len(found))


def sums(*sizes_bytes: int, ranks: int = 2, dtype: str = "float32") -> tuple[Task, ...]:
    return tuple(Task(ranks, "all_reduce", size, dtype) for size in sizes_bytes)


def between(least: float, most: float = math.inf) -> tuple[Task, ...]:
    return sums(*(size for size in SIZES_BYTES if least <= size <= most))


def faster(times: float) -> float:
    """The factor of a target that asks for the peer's time to be ``times`` ours."""
    return 1 / times


SMALL = between(64, 16 * KIB)
# The limit of the machine on which the targets were set, for 64 MiB between two ranks, µs.
LIMIT_PRIVATE_US, LIMIT_SHARED_US = 7300, 5600
OURS, INFERENCE, SHARED = "ours", row("ours", "inference"), row("ours", "shared")

MUST = (
    Target("inference_all_reduce, 64 B-16 KiB: at most 1.1 times the fastest peer", INFERENCE, PEERS, 1.1, SMALL),
    Target("all_reduce, 64 B-16 KiB: at most 1 µs more than 1.1 times the fastest peer", OURS, PEERS, 1.1, SMALL, 1.0),
    Target("all_reduce, 64 B-16 KiB: at most 1 µs more than inference_all_reduce", OURS, (INFERENCE,), 1, SMALL, 1.0),
    Target("all_reduce, 64 KiB-1 MiB: not slower than the fastest peer", OURS, PEERS, 1, between(64 * KIB, MIB)),
    Target("all_reduce, 16 MiB: 1.2 times as fast as the fastest peer", OURS, PEERS, faster(1.2), sums(16 * MIB)),
    Target(
        "all_reduce, 64 and 256 MiB: 1.35 times as fast as the fastest peer",
        OURS,
        PEERS,
        faster(1.35),
        sums(64 * MIB, 256 * MIB),
    ),
    Target("all_reduce, 64 B: 40 times as fast as gloo", OURS, GLOO, faster(40), sums(64)),
    Target("all_reduce, 64 MiB: 4.5 times as fast as gloo", OURS, GLOO, faster(4.5), sums(64 * MIB)),
    Target("inference_all_reduce: faster than DeepSpeed's operator", INFERENCE, DEEPSPEED, 1, between(0)),
    Target(
        "inference_all_reduce, above 1 MiB: 1.5 times as fast as DeepSpeed's operator",
        INFERENCE,
        DEEPSPEED,
        faster(1.5),
        between(16 * MIB),
    ),
    *(
        Target(
            f"{operation}, 1 and 64 MiB: ahead of every peer",
            OURS,
            PEERS,
            1,
            tuple(Task(2, operation, size) for size in (MIB, 64 * MIB)),
        )
        for operation in OTHERS
    ),
    *(
        Target(
            f"all_reduce, {dtype}: ahead of every peer that gets it right",
            OURS,
            PEERS,
            1,
            sums(16 * KIB, MIB, 64 * MIB, dtype=dtype),
        )
        for dtype in SHORT_TYPES
    ),
    Target("shared tensors, 64 MiB: 2.5 times the fastest peer", SHARED, PEERS, faster(2.5), sums(64 * MIB)),
    Target("shared tensors, 64 MiB: 1.3 times the limit", SHARED, (), 0, sums(64 * MIB), 1.3 * LIMIT_SHARED_US),
    Target("private tensors, 64 MiB: 1.5 times the limit", OURS, (), 0, sums(64 * MIB), 1.5 * LIMIT_PRIVATE_US),
    Target("4 ranks: at most 1.15 times the best MPI", OURS, MPIS, 1.15, sums(64, MIB, 64 * MIB, ranks=4)),
)
REACH = (
    Target("all_reduce: the fastest at every size", OURS, PEERS, 1, between(0), must=False),
    Target(
        "all_reduce, 64 MiB and above: 1.5 times as fast as the fastest peer",
        OURS,
        PEERS,
        faster(1.5),
        between(64 * MIB),
        must=False,
    ),
    Target("all_reduce, 64 B: 50 times as fast as gloo", OURS, GLOO, faster(50), sums(64), must=False),
    Target("all_reduce, 64 MiB: 6 times as fast as gloo", OURS, GLOO, faster(6), sums(64 * MIB), must=False),
)
TARGETS = (*MUST, *REACH)


def describe(verdict: Verdict) -> str:
    """Whether a target was met, in a line, with the time that decides it."""
    text = f"{'' if verdict.target.must else '(reach) '}{verdict.target.text}"
    if verdict.task is None or verdict.got_us is None or verdict.bound_us is None:
        return f"{text:86} not measured"
    judged = "met" if verdict.met else "MISSED"
    if verdict.measured < len(verdict.target.tasks):
        judged += " at the sizes measured"
    beside = f", {verdict.beside}" if verdict.beside else ""
    figures = f"{verdict.got_us:,.2f} of {verdict.bound_us:,.2f} µs ({named(verdict.task.size_bytes)}{beside})"
    return f"{text:86} {verdict.got_us / verdict.bound_us:5.2f}  {judged}: {figures}"
