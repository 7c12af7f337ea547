"""Results to be compared, shown and drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from comm_utils.observability.bench_results import BenchFile, BenchResult

Make: TypeAlias = Callable[..., BenchResult]
MakeFile: TypeAlias = Callable[..., BenchFile]


@pytest.fixture
def result() -> Make:
    """``result(time_us, rounds_us, **fields)``."""

    def make(time_us: float = 10.0, rounds_us: tuple[float, ...] | None = None, **values: Any) -> BenchResult:
        rounds = rounds_us or (time_us,)
        found: dict[str, Any] = {
            **{"operation": "all_reduce", "library": "ours", "backend": "gloo", "way": "in_place", "dtype": "float32"},
            **{"op": "sum", "root": -1, "world_size": 2, "nodes": 1, "groups": 1, "size_bytes": 1024, "count": 256},
            **{"iterations": 20, "time_us": time_us, "min_us": min(rounds), "p50_us": time_us, "p95_us": max(rounds)},
            **{"p99_us": max(rounds), "max_us": max(rounds), "rounds_us": rounds, "algbw_gb_per_s": 1.0},
            **{"busbw_gb_per_s": 1.0, "wrong": 0},
        }
        return BenchResult(**{**found, **values})

    return make


@pytest.fixture
def bench_file() -> MakeFile:
    """``bench_file(*results, **system)``."""

    def make(*results: BenchResult, **system: Any) -> BenchFile:
        return BenchFile("2026-01-01T00:00:00+00:00", "x", {"ranks": 2, "cpu": "any", **system}, {}, results)

    return make
