"""Times from events in a device's streams: recorded in order, when they are there, and with nobody waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import comm_collectives.recorded.device_times as device_times
from comm_collectives.recorded.device_times import DeviceTimes

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
    times.end_with(META, times.start(META), future, lambda begin, end: found.append(end - begin))
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
