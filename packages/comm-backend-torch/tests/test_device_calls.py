"""Calls on a device in the records: they end when the device has completed them, in whatever order threads come."""

from __future__ import annotations

import time
from typing import Any

import pytest

from comm_utils.flight_recorder.kinds import Kind
from comm_utils.flight_recorder.layout import ON_DEVICE
from comm_utils.torch_support import device_calls
from comm_utils.torch_support.device_calls import DeviceCalls, keep_process_alive, restore_settings


class Device:
    """A device that goes on when it is told to; torch has no such device for the CPU."""

    def __init__(self) -> None:
        self.recorded = self.completed = 0
        self.capturing = self.failed = False
        self.between: Any = None
        self.during_record: Any = None
        device = self

        class Event:
            at = 0

            def record(self, _: Any) -> None:
                if device.failed:
                    raise RuntimeError("the device has failed")
                if device.during_record is not None:
                    during, device.during_record = device.during_record, None
                    during()
                device.recorded += 1
                self.at = device.recorded

            def query(self) -> bool:
                if device.between is not None:
                    between, device.between = device.between, None
                    between()
                return self.at <= device.completed

        self.Event = Event

    def current_stream(self) -> None: ...

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(device_calls.torch, "get_device_module", lambda _: made)
    monkeypatch.setattr(device_calls, "_NEIGHBOURS_NS", 1 << 60)
    return made


class Records:
    """The states of some calls: None is ended, -1 is failed."""

    def __init__(self, calls: DeviceCalls) -> None:
        self.states: dict[int, int | None] = {}
        kind = Kind(lambda *_: 0, self._end, self._fail, self._wait, self._end)
        self.leave = calls.recorded(kind).end

    def _end(self, number: int) -> None:
        self.states[number] = None

    def _fail(self, number: int) -> None:
        self.states[number] = -1

    def _wait(self, number: int, state: int) -> None:
        self.states[number] = state

    def open(self) -> list[int]:
        return [number for number, state in self.states.items() if state == ON_DEVICE]


def test_calls_end_when_the_device_has_completed_them(device: Device) -> None:
    calls = DeviceCalls("xpu")
    records = Records(calls)
    assert calls.look() == 0
    for number in (1, 2, 3):
        records.leave(number)
    assert records.open() == [1, 2, 3]
    assert calls.look() > 0
    device.completed = 2
    records.leave(4)  # has an event of its own, as the watch waits for that of call 3
    assert calls.look() > 0
    assert records.open() == [1, 2, 3, 4]
    device.completed = 3
    assert calls.look() > 0
    assert records.open() == [4]
    device.completed = 4
    assert calls.look() == 0
    assert records.open() == []


def test_a_call_that_comes_later_has_an_event_of_its_own(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_calls, "_NEIGHBOURS_NS", 1_000_000)
    calls = DeviceCalls("xpu")
    records = Records(calls)
    records.leave(1)
    device.completed = 1
    time.sleep(0.002)
    records.leave(2)  # before a look
    assert calls.look() > 0
    assert records.open() == [2]


@pytest.mark.parametrize("behind", [0, 10, 600])
def test_calls_that_come_all_the_time_end_as_well(device: Device, behind: int) -> None:
    """The device is always so many calls behind, for which there may not be events enough."""
    calls = DeviceCalls("xpu")
    records = Records(calls)
    for number in range(1, 5000):
        records.leave(number)
        device.completed = max(0, number - behind)
        if number % 7 == 0:
            calls.look()
            assert min(behind, number) <= len(records.open()) < 2 * behind + 60
    device.completed = 5000
    assert calls.look() == 0
    assert records.open() == []


def test_a_call_on_which_the_device_waits_has_its_age_whatever_comes_after_it(device: Device) -> None:
    calls = DeviceCalls("xpu")
    records = Records(calls)
    records.leave(1)
    calls.look()
    time.sleep(0.05)
    records.leave(2)
    assert 0.05 <= calls.look() < 5


def test_a_call_that_comes_during_a_look_is_not_lost(device: Device) -> None:
    for before in (1, 15, 16, 17, 40):
        device.recorded = device.completed = 0
        calls = DeviceCalls("xpu")
        records = Records(calls)
        for number in range(1, before + 1):
            records.leave(number)
        device.completed = before

        def come(number: int = before + 1, records: Records = records) -> None:
            records.leave(number)

        device.between = come
        calls.look()
        device.completed = before + 1
        assert calls.look() == 0
        assert records.open() == []


def test_looks_while_a_call_records_its_event_lose_nothing(device: Device) -> None:
    """To record an event may take long, where the queue of the device is full."""
    calls = DeviceCalls("xpu")
    records = Records(calls)
    records.leave(1)

    def look() -> None:
        calls.look()
        device.completed = 1
        calls.look()
        calls.look()

    device.during_record = look
    records.leave(2)
    assert records.open() == [2]
    assert calls.look() > 0
    device.completed = 2
    calls.look()
    assert calls.look() == 0
    assert records.open() == []


@pytest.mark.parametrize("failed", [False, True])
def test_the_end_of_a_group_ends_its_calls(device: Device, failed: bool) -> None:
    calls = DeviceCalls("xpu")
    records = Records(calls)
    assert not calls.close(failed)
    for number in range(1, 100):
        records.leave(number)
    assert calls.close(failed)
    assert set(records.states.values()) == {-1 if failed else None}


def test_calls_of_a_capture_and_of_a_failed_device_end_at_once(device: Device) -> None:
    calls = DeviceCalls("xpu")
    records = Records(calls)
    device.capturing = True
    records.leave(1)
    device.capturing, device.failed = False, True
    records.leave(2)
    assert records.states == {1: None, 2: None}
    assert device.recorded == 0


def test_the_setting_of_the_user_wins() -> None:
    environ: dict[str, str]
    for environ, handling, records in (
        ({}, "2", "0"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "1", "0"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "0"}, None, "0"),
        ({"TORCH_FR_BUFFER_SIZE": "100"}, "2", None),
        ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, "2", "1"),
    ):
        keep_process_alive(environ)
        assert environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == handling
        assert environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT") == records
        restore_settings(environ)


def test_settings_end_with_the_world() -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OTHER": ""}
    keep_process_alive(environ)
    assert len(environ) == 4
    environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"  # by the user, meanwhile
    restore_settings(environ)
    assert environ == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OTHER": "", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
