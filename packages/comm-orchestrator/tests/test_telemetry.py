"""OpenTelemetry's own SDK collects what the comms logger recorded in a real world."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import comm_orchestrator as dist
from comm_orchestrator.telemetry import COUNTERS, GAUGES, start_telemetry
from comm_utils.errors import ArgumentTypeError, BackendUnavailableError
from comm_utils.observability.comms_logger import CommsLogger
from comm_utils.testing import RankPool

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OTEL_PYTHON_METER_PROVIDER": None, "OTEL_SDK_DISABLED": None}
# (operation, size) -> value
Values = dict[tuple[Any, Any], Any]


class Collector:
    """A provider of metrics, and what it has collected."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader], shutdown_on_exit=False)

    def points(self) -> dict[str, list[Any]]:
        found = self.reader.get_metrics_data()
        if found is None:
            return {}
        (resource,) = found.resource_metrics
        (scope,) = resource.scope_metrics
        assert scope.scope.name == "comm_orchestrator"
        for metric in scope.metrics:
            unit, what, _ = {**COUNTERS, **GAUGES}[metric.name]
            assert (metric.unit, metric.description) == (unit, what)
            if metric.name in COUNTERS:
                assert metric.data.is_monotonic
        return {metric.name: list(metric.data.data_points) for metric in scope.metrics}

    def values(self, metric: str = "comm.operations") -> Values:
        """By operation and size."""
        found: Values = {}
        for point in self.points().get(metric, []):
            key = point.attributes["comm.operation"], point.attributes["comm.size_bytes"]
            assert key not in found
            found[key] = point.value
        return found


@pytest.fixture(scope="module")
def rank() -> Iterator[RankPool]:
    """One, on which tests set up a world and destroy it."""
    with RankPool(1, env=ENVIRONMENT) as pool:
        yield pool


def begin() -> torch.Tensor:
    dist.init_distributed(dist_backend="gloo", verbose=False)
    dist.configure(enabled=True, debug=False)
    dist.reset_log()
    return torch.ones(1024)


def run_values() -> None:
    tensor, collector = begin(), Collector()
    stop = dist.start_telemetry(collector.provider)
    assert collector.points() == {}
    for _ in range(3):
        dist.all_reduce(tensor)
    dist.barrier()
    dist.all_reduce(tensor[:2], log_name="gradients")

    points, rows = collector.points(), {row.name: row for row in dist.log_rows()}
    assert set(points) == {*COUNTERS, *GAUGES}
    assert sorted(rows) == ["all_reduce", "barrier", "gradients"]
    for metric, found in points.items():
        assert len(found) == 3
        for point in found:
            attributes = dict(point.attributes)
            row = rows[attributes["comm.name"]]
            assert attributes == {
                "comm.operation": row.operation,
                "comm.name": row.name,
                "comm.size_bytes": row.size_bytes,
                "comm.world_size": 1,
                "comm.ranks": "0",
                "comm.rank": 0,
            }
            expected = {
                "comm.operations": row.calls,
                "comm.io": row.total_bytes,
                "comm.operation.time": row.total_s,
                "comm.operation.duration.min": row.min_s,
                "comm.operation.duration.median": row.median_s,
                "comm.operation.duration.p95": row.p95_s,
                "comm.operation.duration.max": row.max_s,
            }
            assert point.value == expected[metric], (metric, attributes)
    assert {name: row.calls for name, row in rows.items()} == {"all_reduce": 3, "barrier": 1, "gradients": 1}

    # Collecting again at once tells what has come since.
    dist.all_reduce(tensor)
    assert collector.values()["all_reduce", 4096] == 4
    assert collector.values("comm.io")["all_reduce", 4096] == 4 * 4096

    dist.configure(debug=True)
    dist.all_reduce(tensor[:4])
    callers = [point.attributes.get("code.function.name") for point in collector.points()["comm.operations"]]
    assert sorted(callers, key=str) == [None, None, None, "run_values"]

    dist.destroy_process_group()  # a reader may collect once more
    assert {point.attributes["comm.rank"] for point in collector.points()["comm.operations"]} == {0}
    stop()
    collector.provider.shutdown()


def test_values(rank: RankPool) -> None:
    rank.run(run_values)


def run_resets() -> None:
    tensor, collector = begin(), Collector()
    large, small = ("all_reduce", 4096), ("all_reduce", 4)
    stop = dist.start_telemetry(collector.provider)
    for _ in range(5):
        dist.all_reduce(tensor)
    assert collector.values() == {large: 5}
    before_s = collector.values("comm.operation.time")[large]
    dist.reset_log()
    assert collector.values() == {large: 5}
    assert collector.values("comm.operation.duration.max") == {}
    dist.all_reduce(tensor[:1])
    assert collector.values() == {large: 5, small: 1}
    dist.all_reduce(tensor)
    assert collector.values() == {large: 6, small: 1}
    assert collector.values("comm.operation.time")[large] > before_s
    assert set(collector.values("comm.operation.duration.max")) == {large, small}

    # Twice is once.
    again = dist.start_telemetry(collector.provider)
    assert collector.values() == {large: 6, small: 1}
    # Another provider is told what is in the log, and does not disturb the first.
    other = Collector()
    stop_other = dist.start_telemetry(other.provider)
    assert other.values() == {large: 1, small: 1}
    assert collector.values() == {large: 6, small: 1}
    stop_other()
    dist.all_reduce(tensor)
    assert other.values() == {}
    assert collector.values() == {large: 7, small: 1}

    again()
    assert collector.values() == {}
    stop()
    dist.all_reduce(tensor)
    assert collector.values() == {}
    dist.start_telemetry(collector.provider)
    assert collector.values() == {large: 8, small: 1}
    # A log that is another one starts from nothing, and what was before stays.
    start_telemetry(CommsLogger(), collector.provider)
    assert collector.values() == {large: 8, small: 1}
    dist.destroy_process_group()


def test_counters_never_fall_and_telemetry_can_be_stopped(rank: RankPool) -> None:
    rank.run(run_resets)


def run_global() -> None:
    tensor = begin()
    stop = dist.start_telemetry()  # nobody has set a provider
    collector = Collector()
    metrics.set_meter_provider(collector.provider)
    dist.all_reduce(tensor)
    assert collector.values() == {("all_reduce", 4096): 1}
    stop()
    assert collector.values() == {}
    for provider in (None, collector.provider):
        stop = dist.start_telemetry(provider)
        assert collector.values() == {("all_reduce", 4096): 1}
        stop()
    dist.destroy_process_group()


def test_the_global_provider_may_come_later(rank: RankPool) -> None:
    rank.run(run_global)


def test_without_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    with pytest.raises(BackendUnavailableError, match=r"install it with: pip install 'comm-orchestrator\[otel\]'"):
        dist.start_telemetry()


def test_what_is_no_provider() -> None:
    with pytest.raises(ArgumentTypeError, match="meter_provider: got a str, expected a MeterProvider"):
        dist.start_telemetry("otlp")


def test_nothing_of_it_is_imported_before() -> None:
    code = "import sys, comm_orchestrator; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
