"""Calls that the host has left before a device has completed them.

A library such as NCCL puts its kernel into a stream, and the host goes on. So that the watch sees a kernel that waits
for another rank, the record of such a call stays open until the device has completed it. After each call, an event is
recorded in the current stream, which is ordered after the call, and the watch's thread queries it from time to time.
The calls of a group run one after the other, so neighbouring ones share an event, that of the last of them.

A query must not disturb a CUDA graph that another thread captures, which it would invalidate in the usual mode. So the
thread that queries changes its own mode first, and a call within a capture ends at once.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections import deque
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_utils.flight_recorder.kinds import Kind
from comm_utils.flight_recorder.layout import LARGEST_RECORDS, ON_DEVICE

__all__ = [
    "DeviceCalls",
    "abort_communicators",
    "allow_queries",
    "can_follow",
    "host_waits",
    "keep_process_alive",
    "restore_settings",
]

# Libraries whose calls the host itself waits for, whatever device the tensors are on.
_BLOCKING = frozenset(("fake", "gloo", "mpi"))
# In this mode, a thread may query events while another one captures: cudaStreamCaptureModeRelaxed.
_RELAXED = 2
_EXCHANGE_MODE = "cudaThreadExchangeStreamCaptureMode"
# What cudaEventQuery returns while the device has not come to the event.
_NOT_READY = 600
# Events of a group, and how many calls share one. The last one serves all further calls when none is free.
_EVENTS, _CALLS_OF_AN_EVENT = 32, 16
# A call that comes so long after the one before gets an event of its own where one is free: the device may wait for
# this call and have completed that one.
_NEIGHBOURS_NS = 10_000_000
# The name, and the one before torch 2.2.
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"
# Whether torch's flight recorder writes its file after a failure, and what says that a user wants it.
_OWN_RECORDS = (
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
)
# How long the watchdog waits for that file before it lets go of the group; it takes four times of it.
_WAIT_FOR_RECORDS, _WAIT_FOR_RECORDS_MS = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500"
# What keep_process_alive() has set.
_ours: dict[str, str] = {}
_thread = threading.local()


def host_waits(device: str, library: str) -> bool:
    """Return whether the host has passed the end of a call when ``wait()`` returns."""
    return device == "cpu" or library in _BLOCKING


class _Slot:
    """An event and the numbers of the first and the last call that it stands for; 0 is none.

    Attributes:
        is_written: a call is about to record the event.
    """

    __slots__ = ("at_ns", "event", "first", "is_written", "last")

    def __init__(self, event: Any) -> None:
        self.event, self.first, self.last, self.at_ns, self.is_written = event, 0, 0, 0, False


class DeviceCalls:
    """The calls of one group on devices of one type.

    Args:
        device: the type of device; :func:`can_follow` is true of it.
    """

    def __init__(self, device: str) -> None:
        self._module: Any = torch.get_device_module(device)
        self._is_capturing: Callable[[], bool] = getattr(self._module, "is_current_stream_capturing", lambda: False)
        self._current_stream = _cached_streams() if device == "cuda" else self._module.current_stream
        self._has_reached = _has_reached if device == "cuda" else _has_reached_by_torch
        self._free = [_Slot(self._module.Event()) for _ in range(_EVENTS)]
        # In the order of the calls; the last one takes the calls to come.
        self._slots = deque([self._free.pop()])
        self._pending: deque[tuple[Kind, int]] = deque(maxlen=LARGEST_RECORDS)

    def recorded(self, kind: Kind) -> Kind:
        """Return a kind of call whose ``end(number)`` says that the host has gone on."""
        complete, wait, pending, slots, free = kind.complete, kind.wait, self._pending, self._slots, self._free
        is_capturing, current_stream = self._is_capturing, self._current_stream

        def leave(number: int) -> None:
            now_ns = perf_counter_ns()
            # No other thread runs before the next call below, see ``kinds``; then the slot stays where it is.
            slot = slots[-1]
            slot.is_written = True
            try:
                if not slot.last:
                    slot.first = number
                elif free and (number - slot.first >= _CALLS_OF_AN_EVENT or now_ns - slot.at_ns > _NEIGHBOURS_NS):
                    slot.is_written = False
                    slot = free.pop()
                    slot.is_written = True
                    slot.first = number
                    slots.append(slot)
                if is_capturing():
                    complete(number)
                    return
                slot.event.record(current_stream())
                pending.append((kind, number))
                wait(number, ON_DEVICE)
                slot.at_ns = perf_counter_ns()
                # Only now: an event that is later than its call is harmless.
                if number > slot.last:
                    slot.last = number
            except RuntimeError:  # the device has failed, which its next use says, or it is another one
                complete(number)
            finally:
                slot.is_written = False

        return kind._replace(end=leave)

    def look(self) -> float:
        """Record the ends of the calls that the device has completed.

        Returns:
            for how many seconds it has not completed a call that was begun; 0 where it has completed all of them.
        """
        slots, free = self._slots, self._free
        while True:
            slot = slots[0]
            number, at_ns = slot.last, slot.at_ns
            if not number:
                return 0.0
            if not self._has_reached(slot.event):
                if len(slots) == 1 and free:  # so that calls to come do not put it off
                    slots.append(free.pop())
                return (perf_counter_ns() - at_ns) / 1e9
            self._complete_until(number)
            # No other thread runs between the comparison and the assignment, see ``kinds``.
            if slot.last == number:
                if slot.is_written:
                    return 0.0
                slot.last = 0
                if len(slots) == 1:
                    return 0.0
                slots.popleft()
                free.append(slot)

    def _complete_until(self, number: int) -> None:
        pending = self._pending
        with suppress(IndexError):
            while pending[0][1] <= number:
                kind, at = pending.popleft()
                kind.complete(at)

    def close(self, failed: bool) -> bool:
        """Record the end, or the failure, of all calls that are under way; return whether there were any."""
        found = False
        with suppress(IndexError):
            while True:
                kind, number = self._pending.popleft()
                found = True
                (kind.fail if failed else kind.complete)(number)
        return found


def _has_reached(event: Any) -> bool:
    """Return whether the device has come to an event of CUDA, without the GIL, for which the driver may be waiting."""
    query = _runtime_function("cudaEventQuery")
    return _has_reached_by_torch(event) if query is None else query(ctypes.c_void_p(event.cuda_event)) != _NOT_READY


def _has_reached_by_torch(event: Any) -> bool:
    try:
        return bool(event.query())
    except RuntimeError:  # the device has failed: nothing is under way there any more
        return True


def _cached_streams() -> Callable[[], Any]:
    """Return a function that returns the current stream of the current CUDA device, in a tenth of torch's time."""
    raw, device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    known: dict[tuple[int, int], Any] = {}

    def current() -> Any:
        index = device()
        key = index, raw(index)
        found = known.get(key)
        if found is None:
            found = known[key] = torch.cuda.current_stream()
        return found

    return current


def can_follow(device: str) -> bool:
    """Return whether a thread may ask for events of ``device`` while another thread captures a graph."""
    if device != "cuda":
        return True
    # HIP invalidates a capture in every mode.
    return torch.version.hip is None and _runtime_function(_EXCHANGE_MODE) is not None


def allow_queries() -> None:
    """Have this thread's queries of events leave the captures of other threads alone."""
    exchange = _runtime_function(_EXCHANGE_MODE)
    if exchange is not None and not getattr(_thread, "is_relaxed", False):
        exchange(ctypes.byref(ctypes.c_int(_RELAXED)))
        _thread.is_relaxed = True


@cache
def _runtime_function(name: str) -> Callable[[Any], int] | None:
    """Return a function of the CUDA runtime that torch has loaded; None where there is none."""
    with suppress(OSError, AttributeError, ValueError):
        maps = Path("/proc/self/maps").read_text()
        path = next(iter(sorted(set(re.findall(r"/\S*/libcudart[^/\n]*", maps)))), None)
        if path is not None:
            found: Callable[[Any], int] = getattr(ctypes.CDLL(path), name)
            return found
    return None


def keep_process_alive(environ: MutableMapping[str, str]) -> None:
    """Have torch's watchdog of NCCL abort communicators alone where a call fails; it reads this when a group is made.

    By default it ends the process as well, and no call of the program can raise what the watch has found. Before that
    it writes down its own records, or waits for others to do so, for which the end of a group waits for up to a minute;
    so it does not, unless the user has asked for these records.
    """
    settings = {}
    if not {*_ERROR_HANDLING} & environ.keys():
        settings[_ERROR_HANDLING[0]] = "2"  # CleanUpOnly
    if not {*_OWN_RECORDS, _WAIT_FOR_RECORDS} & environ.keys():
        settings |= {_OWN_RECORDS[0]: "0", _WAIT_FOR_RECORDS: _WAIT_FOR_RECORDS_MS}
    environ.update(settings)
    _ours.update(settings)


def restore_settings(environ: MutableMapping[str, str]) -> None:
    """Take back what :func:`keep_process_alive` has set."""
    for name, value in _ours.items():
        if environ.get(name) == value:
            del environ[name]
    _ours.clear()


def abort_communicators(pg: ProcessGroup, libraries: dict[str, str]) -> bool:
    """End the kernels of a group that wait for other ranks; return whether there was a communicator to abort.

    Args:
        libraries: by device type, as the group has them.
    """
    aborted = False
    for device, library in libraries.items():
        if host_waits(device, library):
            continue
        with suppress(AttributeError, RuntimeError):
            backend: Any = pg._get_backend(torch.device(device))
            backend.abort()
            aborted = True
    return aborted
