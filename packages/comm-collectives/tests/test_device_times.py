"""Times from events in a device's streams: recorded in order, when they are there, and with nobody waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import comm_collectives.recorded.device_times as device_times
from comm_collectives.recorded.backend import Recording
from comm_collectives.recorded.device_times import DeviceTimes
from comm_utils.observability import comms_logger
from comm_utils.observability.comms_logger import CommsLogger
from comm_utils.observability.traces.events import RankTrace
from comm_utils.observability.traces.file import TraceWriter, load_rank

META = torch.device("meta")


class Clockwork:
    """A device whose stream goes on when it is told to; torch has no such device for the CPU."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.capturing = False
        self.recorded: list[Clockwork.Recorded] = []
        self.reached = 0
        self.failed = False
        self.waited_for: list[Clockwork.Recorded] = []

    class Recorded:
        def __init__(self, device: Clockwork) -> None:
            self.device = device

        def record(self, stream: str) -> None:
            self.number, self.stream = len(self.device.recorded), stream
            self.device.recorded.append(self)
            self.at_ms = self.device.now_ms
            self.device.now_ms += 1.5

        def query(self) -> bool:
            return self.device.reached > self.number

        def synchronize(self) -> None:
            assert self.stream == "side"  # in which there is nothing to wait for
            self.device.waited_for.append(self)

        def elapsed_time(self, other: Clockwork.Recorded) -> float:
            if self.device.failed:
                raise RuntimeError("the device has failed")
            return other.at_ms - self.at_ms

    def Event(self, enable_timing: bool) -> Clockwork.Recorded:
        assert enable_timing
        return self.Recorded(self)

    def Stream(self, _device: torch.device) -> str:
        return "side"

    def current_stream(self, _device: torch.device) -> str:
        return "current"

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


class Future:
    """A future whose callbacks come when it is told."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Future], None]] = []
        self.failed = False

    def value(self) -> None:
        if self.failed:
            raise RuntimeError("the operation has failed")

    def add_done_callback(self, callback: Callable[[Future], None]) -> None:
        self.callbacks.append(callback)

    def end(self) -> None:
        for callback in self.callbacks:
            callback(self)


@pytest.fixture
def clockwork(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    device = Clockwork()
    monkeypatch.setattr(device_times.torch, "get_device_module", lambda _: device)
    return device


def test_times_come_when_the_device_has_passed(clockwork: Clockwork) -> None:
    times = DeviceTimes()
    found: list[tuple[int, int]] = []

    def record(begin_ns: int, end_ns: int) -> None:
        found.append((begin_ns, end_ns))

    before_ns = time.perf_counter_ns()
    for _ in range(3):
        times.end(META, times.start(META), record)
    assert found == []
    clockwork.reached = 4  # the comparison of clocks, the first operation, and the start of the second
    times.collect()
    assert [end - begin for begin, end in found] == [1_500_000]
    clockwork.reached = 7
    times.collect()
    times.collect()
    assert [end - begin for begin, end in found] == [1_500_000] * 3
    # On the host's clock, 1.5 ms after that was compared, and 3 ms after each other.
    assert 0 <= found[0][0] - 1_500_000 - before_ns < 1e9
    assert [begin - found[0][0] for begin, _ in found] == [0, 3_000_000, 6_000_000]
    assert clockwork.waited_for == clockwork.recorded[:1]


def test_an_operation_ends_with_its_future(clockwork: Clockwork) -> None:
    times, future = DeviceTimes(), Future()
    found: list[int] = []
    times.end_with(
        META, times.start(META), future, lambda begin, end: found.append(end - begin), lambda: found.append(-1)
    )
    clockwork.reached = 99
    times.collect()
    assert found == []
    clockwork.now_ms += 7
    future.end()
    times.collect()
    assert found == [8_500_000]


def test_nothing_is_recorded_into_a_graph(clockwork: Clockwork) -> None:
    clockwork.capturing = True
    assert DeviceTimes().start(META) is None
    assert clockwork.recorded == []


def test_a_device_that_fails_says_so_elsewhere(clockwork: Clockwork) -> None:
    times = DeviceTimes()
    found: list[int] = []
    times.end(META, times.start(META), lambda begin, end: found.append(end - begin))
    clockwork.reached, clockwork.failed = 3, True
    times.collect()
    assert found == []


class Started:
    """An asynchronous operation of a library on a device."""

    def __init__(self) -> None:
        self.future = Future()

    def library_future(self) -> Future:
        return self.future

    def wait(self, timeout: object = None) -> bool:
        return True


class Traced:
    """A job of one rank on a device, whose calls are written into a trace."""

    def __init__(self, folder: Path) -> None:
        self.log = CommsLogger()
        self.works: list[Started] = []
        paths = SimpleNamespace(memo=lambda _: {}, clear=lambda: None)
        inner: Any = SimpleNamespace(
            fast_paths=paths,
            get_process_group_ranks=lambda _: [0],
            get_world_group=lambda: None,
            all_reduce=self.all_reduce,
            fast_path=lambda *_: lambda _: True,
        )
        self.backend = Recording(self.log)(inner)
        writer = TraceWriter(folder, 0)
        writer.begin(RankTrace(0, 1, counted_together=True))
        self.log.start_writing(writer)

    def all_reduce(self, tensor: torch.Tensor, op: object, group: object, async_op: bool) -> Started | None:
        if not async_op:
            return None
        self.works.append(Started())
        return self.works[-1]

    def end(self) -> RankTrace:
        writer = self.log.stop_writing()
        assert writer is not None
        writer.close()
        return load_rank(writer.path)


@pytest.fixture
def traced(clockwork: Clockwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Traced:
    monkeypatch.setattr(comms_logger, "_PATIENCE_S", 0.1)
    return Traced(tmp_path)


@pytest.mark.parametrize("behind_ms", [0.0, 50.0])
def test_a_trace_of_asynchronous_calls_is_read_with_its_waits(
    clockwork: Clockwork, traced: Traced, behind_ms: float
) -> None:
    """The device may be behind the host, which has long returned from the call."""
    tensor = torch.empty(1024, device="meta")
    traced.backend.all_reduce(tensor)  # compares the clocks
    clockwork.now_ms += behind_ms
    works = [traced.backend.all_reduce(tensor, async_op=True) for _ in range(2)]
    traced.works[0].future.end()
    for work in works:
        assert work is not None
        clockwork.now_ms += 3
        work.wait()
        work.wait()
    traced.works[1].future.end()  # a library may call back as late as that
    clockwork.reached = len(clockwork.recorded)
    trace = traced.end()
    assert (trace.complete, trace.dropped, len(trace.events)) == (True, 0, 3)
    assert [len(event.waits) for event in trace.events] == [0, 1, 1]
    for event in trace.events:
        assert event.begin_ns <= event.returned_ns <= event.end_ns
        assert event.operation.on_device
        for wait in event.waits:
            assert event.begin_ns + 3_000_000 <= wait.begin_ns < wait.end_ns
            assert wait.end_ns - wait.begin_ns == pytest.approx(1_500_000, abs=1000)


@pytest.mark.parametrize("is_fast", [True, False])
def test_tensors_of_several_devices_are_told_apart(clockwork: Clockwork, traced: Traced, is_fast: bool) -> None:
    all_reduce: Any = traced.backend.fast_path("all_reduce", "sum") if is_fast else traced.backend.all_reduce
    on_host, on_device = torch.ones(1024), torch.empty(1024, device="meta")
    for tensor in (on_host, on_host, on_device, on_host, on_device):
        all_reduce(tensor)
    clockwork.reached = len(clockwork.recorded)
    assert sorted(event.operation.on_device for event in traced.end().events) == [False] * 3 + [True] * 2


def test_operations_of_one_moment_keep_their_waits_apart(clockwork: Clockwork, traced: Traced) -> None:
    tensor = torch.empty(1024, device="meta")
    works = []
    for number in range(20):
        works.append(traced.backend.all_reduce(tensor, async_op=True))
        clockwork.recorded[-1].at_ms = 10.0
        traced.works[number].future.end()
    for work in works[::2]:
        assert work is not None
        work.wait()
    clockwork.reached = len(clockwork.recorded)
    trace = traced.end()
    assert [len(event.waits) for event in sorted(trace.events, key=lambda one: one.sequence)] == [1, 0] * 10


def test_operations_under_way_at_the_end_of_a_trace_are_dropped(clockwork: Clockwork, traced: Traced) -> None:
    tensor = torch.empty(1024, device="meta")
    traced.backend.all_reduce(tensor)
    clockwork.reached = len(clockwork.recorded)
    traced.backend.all_reduce(tensor)  # which the device does not complete
    traced.backend.all_reduce(tensor, async_op=True)  # whose future does not end
    on_host = traced.backend.all_reduce(torch.empty(1024), async_op=True)  # which nobody waits for
    trace = traced.end()
    assert (len(trace.events), trace.dropped, trace.complete) == (1, 3, True)
    assert on_host is not None
    on_host.wait()  # after the end, which changes nothing


def test_operations_that_failed_are_not_recorded(clockwork: Clockwork, traced: Traced) -> None:
    tensor = torch.empty(1024, device="meta")
    for failed in (False, True):
        traced.backend.all_reduce(tensor, async_op=True)
        traced.works[-1].future.failed = failed
        traced.works[-1].future.end()
    clockwork.reached = len(clockwork.recorded)
    trace = traced.end()
    assert (len(trace.events), trace.dropped, trace.complete) == (1, 0, True)


def test_a_trace_waits_for_the_device(clockwork: Clockwork, traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comms_logger, "_PATIENCE_S", 30.0)

    def pause(_: float) -> None:
        clockwork.reached = len(clockwork.recorded)

    monkeypatch.setattr(comms_logger, "sleep", pause)
    traced.backend.all_reduce(torch.empty(1024, device="meta"))
    trace = traced.end()
    assert (len(trace.events), trace.dropped) == (1, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_times_on_a_device() -> None:
    """A kernel that sleeps 50 ms lasts as long, whoever looks, and the call itself takes no time."""
    times = DeviceTimes()
    found: list[tuple[int, int]] = []
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    cycles = round(0.05 * torch.cuda.get_device_properties(device).clock_rate * 1e3)
    times.start(device)  # compares clocks
    begin_ns = time.perf_counter_ns()
    start = times.start(device)
    torch.cuda._sleep(cycles)
    times.end(device, start, lambda *both: found.append(both))
    assert time.perf_counter_ns() - begin_ns < 30e6
    times.collect()
    assert found == []
    torch.cuda.synchronize()
    end_ns = time.perf_counter_ns()
    times.collect()
    ((found_begin_ns, found_end_ns),) = found
    assert found_end_ns - found_begin_ns == pytest.approx(end_ns - begin_ns, rel=0.05)
    assert abs(found_begin_ns - begin_ns) < 2e6
    assert abs(found_end_ns - end_ns) < 2e6
