"""Measurements, sorted by what a fit is made of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from comm_utils.errors import ArgumentError
from comm_utils.observability.bench_results import BenchFile, BenchResult
from comm_utils.observability.cost_model.rounds import Shape

__all__ = ["STATISTICS", "Collected", "Key", "Point", "collect"]

#: Which time of a measurement is fitted.
STATISTICS: dict[str, Callable[[BenchResult], float]] = {
    "median": lambda one: statistics.median(one.rounds_us),
    # Divided first: the sum of large times would be out of range.
    "average": lambda one: math.fsum(time_us / len(one.rounds_us) for time_us in one.rounds_us),
    "min": lambda one: one.min_us,
}

# Nothing takes less; times below would only overflow.
_SHORTEST_US = 1e-6


@dataclass(frozen=True, order=True)
class Key:
    """The properties that measurements of one fit share; ``level`` is :attr:`Shape.level`, ``codec`` empty for none."""

    operation: str
    library: str
    backend: str
    level: str
    way: str
    dtype: str
    op: str
    codec: str = ""

    def __str__(self) -> str:
        words = (self.operation, f"{self.library}/{self.backend}", self.level, self.way, self.dtype, self.op)
        return " ".join(word for word in (*words, self.codec) if word)


@dataclass(frozen=True, order=True)
class Point:
    """One measured time."""

    shape: Shape
    size_bytes: int
    time_us: float


@dataclass(frozen=True)
class Collected:
    """Points by fit, and what was left out and why."""

    points: dict[Key, list[Point]]
    notes: list[str]


def collect(files: Iterable[BenchFile], statistic: str = "median") -> Collected:
    """Sort the results of ``files``.

    Args:
        statistic: a key of :data:`STATISTICS`; ``median`` is that of the rounds.

    Raises:
        ArgumentError: nothing is left to be fitted.
    """
    time_of = STATISTICS[statistic]
    found: dict[Key, list[tuple[int, Point]]] = {}
    wrong = untimed = 0
    for one in (result for file in files for result in file.results):
        time_us = time_of(one)
        if one.wrong:
            wrong += 1
        elif time_us < _SHORTEST_US or not 1 <= one.nodes <= one.world_size:
            untimed += 1
        else:
            shape = Shape(one.world_size, one.nodes)
            key = Key(one.operation, one.library, one.backend, shape.level, one.way, one.dtype, one.op, one.codec)
            found.setdefault(key, []).append((one.groups, Point(shape, one.size_bytes, time_us)))
    notes = []
    if wrong:
        notes.append(f"left out: {wrong} results with wrong elements")
    if untimed:
        notes.append(f"left out: {untimed} results without a time above zero, or on more hosts than ranks")
    if not found:
        raise ArgumentError(
            "got bench files without a usable result"
            + (f" ({'; '.join(notes)})" if notes else "")
            + "; expected at least one correct one with a time; make them with: commctl bench --json FILE"
        )
    alone = 0
    points: dict[Key, list[Point]] = {}
    for key, some in sorted(found.items()):
        # As in a job, where all ranks communicate: the most groups at once that were measured.
        fullest = {point.shape: 0 for _, point in some}
        for groups, point in some:
            fullest[point.shape] = max(fullest[point.shape], groups)
        points[key] = sorted(point for groups, point in some if groups == fullest[point.shape])
        alone += len(some) - len(points[key])
    if alone:
        notes.append(f"left out: {alone} results of fewer groups at once than others of the same number of ranks")
    return Collected(points, notes)
