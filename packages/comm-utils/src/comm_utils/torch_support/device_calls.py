"""Calls that the host has left while a device has not passed them yet.

A library such as NCCL puts its kernel into a stream, and the host goes on. So that the watch sees a kernel that waits
for another rank, the record of such a call stays open until the device has passed it. At the end of each call, an event
is recorded in the current stream, which is ordered after the call, and the watch's thread asks from time to time. The
calls of a group run one after the other, so some neighbouring ones share an event, that of the last of them.

Asking must not disturb a CUDA graph that another thread captures, which a query of an event in the usual mode would
invalidate. So the thread that asks changes its own mode first, and a call within a capture ends at once.
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
]

# Libraries whose calls the host itself waits for, whatever device the tensors are on.
_BLOCKING = frozenset(("fake", "gloo", "mpi"))
# In this mode, a thread may query events while another one captures: cudaStreamCaptureModeRelaxed.
_RELAXED = 2
# Of a group, and how many calls one of them takes. Where all are taken, the last one takes the rest.
_MARKS, _CALLS_OF_A_MARK = 32, 16
_RUNTIMES = {"libcudart": "cudaThreadExchangeStreamCaptureMode", "libamdhip64": "hipThreadExchangeStreamCaptureMode"}
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
_thread = threading.local()


def host_waits(device: str, library: str) -> bool:
    """Return whether the host has passed the end of a call when ``wait()`` returns."""
    return device == "cpu" or library in _BLOCKING


class _Mark:
    """The event of some neighbouring calls, and the numbers of the first and the last; 0 while it has none."""

    __slots__ = ("at_ns", "event", "first", "number")

    def __init__(self, event: Any) -> None:
        self.event, self.first, self.number, self.at_ns = event, 0, 0, 0


class DeviceCalls:
    """The calls of one group on devices of one type.

    Args:
        device: the type of device; :func:`can_follow` is true of it.
    """

    def __init__(self, device: str) -> None:
        self._module: Any = torch.get_device_module(device)
        self._is_capturing: Callable[[], bool] = getattr(self._module, "is_current_stream_capturing", lambda: False)
        self._current_stream = _cached_streams() if device == "cuda" else self._module.current_stream
        self._free = [_Mark(self._module.Event()) for _ in range(_MARKS)]
        # In the order of the calls; the last one takes the calls to come.
        self._marks = deque([self._free.pop()])
        self._pending: deque[tuple[Callable[[int], None], int]] = deque(maxlen=LARGEST_RECORDS)

    def recorded(self, kind: Kind) -> Kind:
        """Return a kind of call whose ``end(number)`` says that the host has gone on."""
        ended, wait, pending, marks, free = kind.end, kind.wait, self._pending, self._marks, self._free
        is_capturing, current_stream = self._is_capturing, self._current_stream

        def leave(number: int) -> None:
            mark = marks[-1]
            if not mark.number:
                mark.first = number
            elif free and number - mark.first >= _CALLS_OF_A_MARK:
                mark = free.pop()
                mark.first = number
                marks.append(mark)
            try:
                if is_capturing():
                    ended(number)
                    return
                mark.event.record(current_stream())
            except RuntimeError:  # the device has failed, which its next use says, or it is another one
                ended(number)
                return
            wait(number, ON_DEVICE)
            pending.append((ended, number))
            mark.at_ns = perf_counter_ns()
            # Only now: an event that is later than its number says is harmless.
            if number > mark.number:
                mark.number = number

        return kind._replace(end=leave)

    def look(self) -> float:
        """Record the ends of the calls that the device has passed.

        Returns:
            for how many seconds it has not passed a call that was begun; 0 where it has passed all of them.
        """
        marks, free = self._marks, self._free
        while True:
            mark = marks[0]
            number, at_ns = mark.number, mark.at_ns
            if not number:
                return 0.0
            if not _has_passed(mark.event):
                if len(marks) == 1 and free:  # so that calls to come do not put it off
                    marks.append(free.pop())
                return (perf_counter_ns() - at_ns) / 1e9
            self._end_until(number)
            # No other thread runs between the comparison and the assignment, see ``kinds``.
            if mark.number == number:
                mark.number = 0
                if len(marks) == 1:
                    return 0.0
                marks.popleft()
                free.append(mark)

    def _end_until(self, number: int) -> None:
        pending = self._pending
        with suppress(IndexError):
            while pending[0][1] <= number:
                ended, at = pending.popleft()
                ended(at)


def _has_passed(event: Any) -> bool:
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
    """Return whether this thread may ask for events of ``device`` while another thread captures a graph."""
    if device != "cuda":
        return True
    return _capture_mode() is not None


def allow_queries() -> None:
    """Have this thread's queries of events leave the captures of other threads alone."""
    exchange = _capture_mode()
    if exchange is not None and not getattr(_thread, "is_relaxed", False):
        exchange(ctypes.byref(ctypes.c_int(_RELAXED)))
        _thread.is_relaxed = True


@cache
def _capture_mode() -> Callable[[Any], int] | None:
    """Return the function of the runtime that torch has loaded, which torch itself does not offer."""
    with suppress(OSError, AttributeError):
        loaded = set(re.findall(r"/\S*/(?:libcudart|libamdhip64)[^/\n]*", Path("/proc/self/maps").read_text()))
        for path in sorted(loaded):
            name = next(one for one in _RUNTIMES if Path(path).name.startswith(one))
            found: Callable[[Any], int] = getattr(ctypes.CDLL(path), _RUNTIMES[name])
            return found
    return None


def keep_process_alive(environ: MutableMapping[str, str]) -> None:
    """Have torch's watchdog of NCCL abort communicators alone where a call fails; it reads this when a group is made.

    By default it ends the process as well, and no call of the program can raise what the watch has found. Before that
    it writes down its own records, for which the end of a group waits for more than ten seconds; so it does not, unless
    the user has asked for these records.
    """
    if not {*_ERROR_HANDLING} & environ.keys():
        environ[_ERROR_HANDLING[0]] = "2"  # CleanUpOnly
    if not {*_OWN_RECORDS} & environ.keys():
        environ[_OWN_RECORDS[0]] = "0"


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
