"""What was measured, and how it compares with what was asked for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from measuring import KIB, LEAST_ROUNDS, MIB, interval, named

from peers.tasks import MEMORIES, OTHER_SIZES_BYTES, OTHERS, SHORT_TYPES, SIZES_BYTES, Task

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
    """µs of each timed loop's calls: task (with no way) -> row -> times; and why a peer does not do a task.

    ``rounds_us``: likewise, the median of each round.
    """

    times_us: dict[Task, dict[str, list[float]]] = field(default_factory=dict)
    rounds_us: dict[Task, dict[str, list[float]]] = field(default_factory=dict)
    unsupported: dict[tuple[Task, str], str] = field(default_factory=dict)

    def add(self, task: Task, peer: str, times_us: Iterable[float]) -> None:
        """Add a block's times, of the next round."""
        times_us, name = list(times_us), row(peer, task.way)
        self.times_us.setdefault(task.by(""), {}).setdefault(name, []).extend(times_us)
        self.rounds_us.setdefault(task.by(""), {}).setdefault(name, []).append(statistics.median(times_us))

    def median_us(self, task: Task, name: str) -> float | None:
        """The median of the rounds' medians, of which the ratios and their intervals are made as well."""
        found = self.rounds_us.get(task, {}).get(name)
        return statistics.median(found) if found else None

    def min_us(self, task: Task, name: str) -> float | None:
        return min(self.times_us.get(task, {}).get(name, []), default=None)

    def lower_ratio(self, task: Task, name: str, peer: str, factor: float = 1.0, more_us: float = 0.0) -> float | None:
        """``factor`` times the peer's time and ``more_us``, over that of ``name``: the lower end of the 95 % interval.

        Of the medians of rounds, by bootstrap over rounds; None where there are too few for it.
        """
        count = self.rounds_of(task, name, peer)
        if count < LEAST_ROUNDS:
            return None
        return interval(lambda rounds: self.ratio(task, name, peer, rounds, factor, more_us), count)[0]

    def rounds_of(self, task: Task, *names: str) -> int:
        """How many rounds all of these rows have."""
        rows = self.rounds_us.get(task, {})
        return min(len(rows.get(name, ())) for name in names)

    def ratio(
        self, task: Task, name: str, peer: str, rounds: Sequence[int], factor: float = 1.0, more_us: float = 0.0
    ) -> float:
        """``factor`` times the peer's time and ``more_us``, over that of ``name``, in these rounds."""
        own_us, peer_us = (statistics.median(self.rounds_us[task][row][one] for one in rounds) for row in (name, peer))
        return (factor * peer_us + more_us) / own_us

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
                "median_us": self.median_us(task, name),
                "min_us": min(times_us),
                "times_us": times_us,
            }
            for task, rows in self.times_us.items()
            for name, times_us in rows.items()
        ]


@dataclass(frozen=True)
class Verdict:
    """``got_us`` beside what it may be at most, where that is hardest; None where it was not measured."""

    target: Target
    task: Task | None = None
    got_us: float | None = None
    bound_us: float | None = None
    beside: str = ""
    #: Sizes that were measured, of all that the target is for.
    measured: int = 0
    #: ``bound_us`` over ``got_us``: the lower end of its 95 % interval, or itself where there are too few rounds.
    lower: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.lower is None else self.lower >= 1

    def to_json(self) -> dict[str, Any]:
        where = {name: getattr(self.task, name) for name in ("size_bytes", "dtype", "memory")} if self.task else {}
        figures = {"got_us": self.got_us, "bound_us": self.bound_us, "beside": self.beside, "met": self.met}
        return {"target": self.target.text, "must": self.target.must, **where, **figures, "lower": self.lower}


@dataclass(frozen=True)
class Target:
    """The median of ``row`` is at most ``factor`` times that of the fastest of ``peers``, and ``more_us``.

    With all but 2.5 % of certainty: the lower end of the 95 % interval of the ratio counts, with four rounds and more.
    """

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
            bound_us = self.factor * fastest_us + self.more_us
            lower = results.lower_ratio(task, self.row, name, self.factor, self.more_us) if name else bound_us / got_us
            found.append((lower if lower is not None else bound_us / got_us, task, got_us, bound_us, name))
        if not found:
            return Verdict(self)
        lower, task, got_us, bound_us, name = min(found, key=lambda one: one[0])
        return Verdict(self, task, got_us, bound_us, name, len(found), lower)


@dataclass(frozen=True)
class MeanTarget(Target):
    """The geometric mean over ``tasks`` of the ratio of the fastest peer's time to that of ``row`` is 1 and more."""

    def judge(self, results: Results) -> Verdict:
        found = {}
        for task in self.tasks:
            got_us, fastest = results.median_us(task, self.row), results.fastest(task, self.peers)
            if got_us is not None and fastest is not None:
                found[task] = fastest[1]
        if not found:
            return Verdict(self)

        def mean(rounds: Sequence[int]) -> float:
            return statistics.geometric_mean(
                results.ratio(task, self.row, peer, rounds) for task, peer in found.items()
            )

        count = min(results.rounds_of(task, self.row, peer) for task, peer in found.items())
        ratio, (lower, _) = mean(range(count)), interval(mean, count)
        return Verdict(self, self.tasks[0], 1 / ratio, 1.0, "the mean", len(found), lower)


def of_all(operation: str, sizes_bytes: Iterable[int], dtype: str = "float32", ranks: int = 2) -> tuple[Task, ...]:
    """Tasks of these sizes, hot and fresh."""
    return tuple(
        Task(ranks, operation, size, dtype, memory=memory) for memory in MEMORIES for size in sorted(sizes_bytes)
    )


def sums(least: float, most: float = math.inf) -> tuple[Task, ...]:
    return of_all("all_reduce", (size for size in SIZES_BYTES if least <= size <= most))


SHORT_SIZES = (16 * KIB, MIB, 64 * MIB)
OURS, INFERENCE, SHARED = "ours", row("ours", "inference"), row("ours", "shared")

# What is asked for on every machine, whatever it is.
TARGETS = (
    Target("inference_all_reduce up to 256 KiB: at most 1.05 times", INFERENCE, PEERS, 1.05, sums(64, 256 * KIB)),
    Target("all_reduce up to 256 KiB: at most 0.5 µs more than that", OURS, PEERS, 1.05, sums(64, 256 * KIB), 0.5),
    Target("all_reduce from 512 KiB: ahead", OURS, PEERS, 1, sums(512 * KIB)),
    Target("all_reduce from 16 MiB: 1.15 times as fast", OURS, PEERS, 1 / 1.15, sums(16 * MIB)),
    *(
        Target(f"all_reduce of {dtype}, {text}", OURS, PEERS, factor, of_all("all_reduce", sizes, dtype), more_us)
        for dtype in SHORT_TYPES
        for text, sizes, factor, more_us in (
            ("16 KiB: at most 1.05 times and 0.5 µs", SHORT_SIZES[:1], 1.05, 0.5),
            ("1 MiB: ahead", SHORT_SIZES[1:2], 1, 0.0),
            ("64 MiB: 1.15 times as fast", SHORT_SIZES[2:], 1 / 1.15, 0.0),
        )
    ),
    *(
        Target(f"{operation}, {text}", OURS, PEERS, 1.05, of_all(operation, sizes), more_us)
        for operation in OTHERS
        for text, sizes, more_us in (
            ("64 B and 4 KiB: at most 1.05 times and 0.5 µs", OTHER_SIZES_BYTES[:2], 0.5),
            ("from 64 KiB: at most 1.05 times", OTHER_SIZES_BYTES[2:], 0.0),
        )
    ),
    *(
        MeanTarget(f"{operation}: ahead in the geometric mean", OURS, PEERS, 1, of_all(operation, OTHER_SIZES_BYTES))
        for operation in OTHERS
    ),
    Target(
        "4 ranks on 2 cores: not slower",
        OURS,
        PEERS,
        1,
        of_all("all_reduce", (64, 64 * KIB, MIB, 64 * MIB), ranks=4),
    ),
    Target(
        "shared tensors of 64 MiB: 1.8 times as fast",
        SHARED,
        PEERS,
        1 / 1.8,
        of_all("all_reduce", (64 * MIB,)),
    ),
    Target("inference_all_reduce: ahead of DeepSpeed's operator", INFERENCE, DEEPSPEED, 1, sums(0), must=False),
)


def describe(verdict: Verdict) -> str:
    """Whether a target was met, in a line, with the time that decides it."""
    text = f"{'' if verdict.target.must else '(reach) '}{verdict.target.text}"
    if verdict.task is None or verdict.got_us is None or verdict.bound_us is None:
        return f"{text:72} not measured"
    judged = "met" if verdict.met else "MISSED"
    if verdict.measured < len(verdict.target.tasks):
        judged += " at the sizes measured"
    beside = f", {verdict.beside}" if verdict.beside else ""
    where = f"{named(verdict.task.size_bytes)} {verdict.task.memory}{beside}"
    figures = f"{verdict.got_us:,.2f} of {verdict.bound_us:,.2f} µs ({where})"
    return f"{text:72} {verdict.lower:5.2f}  {judged}: {figures}"
