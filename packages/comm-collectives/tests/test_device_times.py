"""Times from events in a device's streams: recorded in order, when they are there, and with nobody waiting."""

from __future__ import annotations

import time

import pytest
import torch

import comm_collectives.device_times as device_times
from comm_collectives.device_times import DeviceTimes


class Clockwork:
    """A device whose stream goes on when it is told to; torch has no such device for the CPU."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.capturing = False
        self.reached = 0
        self.recorded: list[Clockwork.Recorded] = []
        self.failed = False

    class Recorded:
        def __init__(self, device: Clockwork) -> None:
            self.device = device

        def record(self, _stream: object) -> None:
            self.number = len(self.device.recorded)
            self.device.recorded.append(self)
            self.at_ms = self.device.now_ms
            self.device.now_ms += 1.5

        def query(self) -> bool:
            return self.device.reached > self.number

        def elapsed_time(self, other: Clockwork.Recorded) -> float:
            if self.device.failed:
                raise RuntimeError("the device has failed")
            return other.at_ms - self.at_ms

    def Event(self, enable_timing: bool) -> Clockwork.Recorded:
        assert enable_timing
        return self.Recorded(self)

    def current_stream(self, _device: torch.device) -> str:
        return "current"

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


@pytest.fixture
def clockwork(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    device = Clockwork()
    monkeypatch.setattr(device_times.torch, "get_device_module", lambda _: device)
    return device


def test_times_come_when_the_device_has_passed(clockwork: Clockwork) -> None:
    times, found = DeviceTimes(), []
    device = torch.device("meta")
    for _ in range(3):
        times.end(device, times.start(device), found.append)
    assert found == []
    clockwork.reached = 3  # the first operation, and the start of the second
    times.collect()
    assert found == [1_500_000]
    clockwork.reached = 6
    times.collect()
    times.collect()
    assert found == [1_500_000] * 3


def test_nothing_is_recorded_into_a_graph(clockwork: Clockwork) -> None:
    clockwork.capturing = True
    assert DeviceTimes().start(torch.device("meta")) is None


def test_a_device_that_fails_says_so_elsewhere(clockwork: Clockwork) -> None:
    times, found = DeviceTimes(), []
    device = torch.device("meta")
    times.end(device, times.start(device), found.append)
    clockwork.reached, clockwork.failed = 2, True
    times.collect()
    assert found == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("aside", [False, True], ids=["sync", "async"])
def test_times_on_a_device(aside: bool) -> None:
    """A kernel that sleeps 50 ms lasts as long, whoever looks, and the call itself takes no time."""
    times, found = DeviceTimes(), []
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream() if aside else torch.cuda.current_stream()
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    cycles = round(0.05 * torch.cuda.get_device_properties(device).clock_rate * 1e3)

    class Waiting:
        def wait(self) -> None:
            torch.cuda.current_stream().wait_stream(stream)

    begin = time.perf_counter()
    start = times.start(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)
    times.end(device, start, found.append, Waiting() if aside else None)
    assert time.perf_counter() - begin < 0.03
    assert found == []
    stream.synchronize()
    slept_s = time.perf_counter() - begin
    torch.cuda.synchronize()
    times.collect()
    assert found[0] * 1e-9 == pytest.approx(slept_s, rel=0.05)
