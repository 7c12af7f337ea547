"""Times of operations on an accelerator, from events in its streams: nobody waits for the device, nothing is held up.

An operation lasts from the moment the current stream reaches the call until the library's stream has finished it. What
has finished is asked at later calls and whenever the log is read; it is recorded as beginning when the call was made.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

__all__ = ["DeviceTimes"]

# More are not kept: a device that is so far behind is not waited for.
_MOST_PENDING = 65536


class _Pending(NamedTuple):
    start: Any
    end: Any
    record: Callable[[int], None]


class DeviceTimes:
    """What was started on devices and has not been seen to end."""

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque(maxlen=_MOST_PENDING)
        self._lock = threading.Lock()
        self._side_streams: dict[torch.device, Any] = {}

    def start(self, device: torch.device) -> Any:
        """An event in the current stream of ``device``; None where there can be none, as in a CUDA graph."""
        module = torch.get_device_module(device)
        capturing = getattr(module, "is_current_stream_capturing", None)
        if capturing is not None and capturing():
            return None
        event = module.Event(enable_timing=True)
        event.record(module.current_stream(device))
        return event

    def end(self, device: torch.device, start: Any, record: Callable[[int], None], work: Any = None) -> None:
        """The call has returned.

        Args:
            record: takes how long it lasted, ns.
            work: of an asynchronous operation; the current stream does not wait for it.
        """
        module = torch.get_device_module(device)
        event = module.Event(enable_timing=True)
        if work is None:
            event.record(module.current_stream(device))
        else:
            side = self._side_streams.get(device)
            if side is None:
                side = self._side_streams[device] = module.Stream(device)
            with module.stream(side):
                work.wait()
                event.record(side)
        self._pending.append(_Pending(start, event, record))
        self.collect()

    def collect(self) -> None:
        """Record what has ended; waits for nothing."""
        if not self._pending or not self._lock.acquire(blocking=False):
            return
        try:
            while self._pending and self._pending[0].end.query():
                start, end, record = self._pending.popleft()
                with suppress(RuntimeError):  # the device has failed, and the next call says so
                    record(round(start.elapsed_time(end) * 1e6))
        finally:
            self._lock.release()
