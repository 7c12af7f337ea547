"""Turn the times of all ranks and rounds into results, and write them as comma-separated values."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean, median

from comm_orchestrator.tools.bench.plan import Row
from comm_utils.atomic_write import replacing
from comm_utils.csv_cells import cell
from comm_utils.observability.bench_results import BenchResult
from comm_utils.sizes import bandwidth

__all__ = ["Seen", "Setting", "over_ranks", "percentile", "summed_up", "write_csv"]


@dataclass(frozen=True)
class Seen:
    """The times of a variant on one rank; NaN on a rank that took no part; ``wrong``: -1 for unchecked.

    ``wire_bytes`` are those that it sends in a compressed call.
    """

    wrong: int
    rounds_us: list[float]
    calls_us: list[float]
    wire_bytes: int = 0

    def numbers(self) -> list[float]:
        """Return the numbers as one list, for :meth:`of`."""
        return [float(self.wrong), float(self.wire_bytes), *self.rounds_us, *self.calls_us]

    @classmethod
    def of(cls, numbers: Sequence[float], rounds: int, calls: int) -> Seen:
        times = list(numbers[2 : 2 + rounds + calls])
        return cls(int(numbers[0]), times[:rounds], times[rounds:], int(numbers[1]))


@dataclass(frozen=True)
class Setting:
    """The facts that all results of a run share."""

    world_size: int
    nodes: int
    groups: int
    iterations: int
    average: int


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the nearest rank, as nccl-tests takes it."""
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]


def over_ranks(average: int, times: Sequence[float]) -> float:
    """Return one time out of those of all ranks; NaN counts for none."""
    there = [one for one in times if not math.isnan(one)]
    functions: tuple[Callable[[Sequence[float]], float], ...] = (lambda found: found[0], fmean, min, max)
    return functions[average](there)


def summed_up(
    row: Row, library: str, backend: str, way: str, seen: Sequence[Seen], setting: Setting, codec: str = ""
) -> BenchResult:
    """Return the result of a variant; ``seen[rank]`` is what that rank saw."""
    rounds_us = [over_ranks(setting.average, times) for times in zip(*(one.rounds_us for one in seen), strict=True)]
    calls_us = [over_ranks(setting.average, times) for times in zip(*(one.calls_us for one in seen), strict=True)]
    ordered = sorted(calls_us or rounds_us)
    time_us = median(rounds_us)
    speed = bandwidth(row.operation, row.size_bytes, time_us / 1e6, setting.world_size)
    checked = all(one.wrong >= 0 for one in seen)
    return BenchResult(
        operation=row.operation,
        library=library,
        backend=backend,
        way=way,
        dtype=row.dtype,
        op=row.op,
        root=row.root,
        world_size=setting.world_size,
        nodes=setting.nodes,
        groups=setting.groups,
        size_bytes=row.size_bytes,
        count=row.count,
        iterations=setting.iterations,
        time_us=time_us,
        min_us=ordered[0],
        p50_us=percentile(ordered, 0.5),
        p95_us=percentile(ordered, 0.95),
        p99_us=percentile(ordered, 0.99),
        max_us=ordered[-1],
        rounds_us=tuple(rounds_us),
        algbw_gb_per_s=speed.algbw_gb_per_s,
        busbw_gb_per_s=speed.busbw_gb_per_s,
        wrong=sum(one.wrong for one in seen) if checked else None,
        codec=codec,
        wire_bytes=max(one.wire_bytes for one in seen),
    )


def write_csv(results: Sequence[BenchResult], path: str) -> None:
    """Write a line for each result below the names of its fields; spaces separate rounds.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as file:
        writer = csv.DictWriter(file, [one.name for one in fields(BenchResult)], lineterminator="\n")
        writer.writeheader()
        for one in results:
            cells = {**asdict(one), "rounds_us": " ".join(f"{time:.3f}" for time in one.rounds_us)}
            writer.writerow({name: cell(value) for name, value in cells.items()})
