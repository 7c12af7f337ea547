"""Times of operations on an accelerator, from events in its streams: nobody waits for the device, nothing is held up.

An operation lasts from the moment the current stream reaches the call until the library's stream has finished it, both
on the host's clock. What has finished is asked at later calls and whenever the log is read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

__all__ = ["DeviceTimes"]

# More are not kept: a device that is so far behind is not waited for.
_MOST_PENDING = 65536
# The device's clock is compared with the host's again after so long; they drift apart by microseconds a second.
_COMPARED_FOR_NS = 10 * 10**9


class _Pending(NamedTuple):
    device: torch.device
    start: Any
    end: Any
    record: Callable[[int, int], None]


class _Anchor(NamedTuple):
    """An event, and what the host's clock showed when the device came to it."""

    event: Any
    at_ns: int


class DeviceTimes:
    """Operations that were started on devices and are not known to have completed."""

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque(maxlen=_MOST_PENDING)
        self._lock = threading.Lock()
        self._anchors: dict[torch.device, _Anchor] = {}
        self._side_streams: dict[torch.device, Any] = {}

    def start(self, device: torch.device) -> Any:
        """Return an event in the current stream of ``device``; None where there can be none, as in a CUDA graph."""
        module = torch.get_device_module(device)
        capturing = getattr(module, "is_current_stream_capturing", None)
        if capturing is not None and capturing():
            return None
        self._compare_clocks(device, module)
        return _recorded(module, device)

    def end(self, device: torch.device, start: Any, record: Callable[[int, int], None]) -> None:
        """Record the end of the operation in the current stream of ``device``.

        Args:
            record: takes when it began and ended, ns on the host's clock.
        """
        event = _recorded(torch.get_device_module(device), device)
        self._pending.append(_Pending(device, start, event, record))

    def end_with(
        self,
        device: torch.device,
        start: Any,
        future: Any,
        record: Callable[[int, int], None],
        failed: Callable[[], None],
    ) -> None:
        """Record the end of the operation with ``future``, whose callbacks run in a stream that is ordered after it.

        The handle's own ``wait()`` is left to the program: c10d lets go of the operation's tensors there.

        Args:
            record: as for :meth:`end`.
            failed: is called instead where the operation has failed.
        """

        def done(future: Any) -> None:
            try:
                future.value()
            except Exception:
                failed()
                return
            with suppress(RuntimeError):
                self.end(device, start, record)

        future.add_done_callback(done)

    def collect(self) -> bool:
        """Record what has ended; wait for nothing. Return whether operations are still under way."""
        if not self._pending or not self._lock.acquire(blocking=False):
            return bool(self._pending)
        try:
            while self._pending and self._pending[0].end.query():
                device, start, end, record = self._pending.popleft()
                anchor = self._anchors[device]
                with suppress(RuntimeError):  # the device has failed, and the next call says so
                    begin_ns = anchor.at_ns + round(anchor.event.elapsed_time(start) * 1e6)
                    record(begin_ns, begin_ns + round(start.elapsed_time(end) * 1e6))
        finally:
            self._lock.release()
        return bool(self._pending)

    def _compare_clocks(self, device: torch.device, module: Any) -> None:
        anchor = self._anchors.get(device)
        if anchor is not None and perf_counter_ns() - anchor.at_ns < _COMPARED_FOR_NS:
            return
        side = self._side_streams.get(device)
        if side is None:
            side = self._side_streams[device] = module.Stream(device)
        # An event in a stream in which there is nothing else: that it is over says nothing of the others.
        event = module.Event(enable_timing=True)
        before_ns = perf_counter_ns()
        event.record(side)
        event.synchronize()
        self._anchors[device] = _Anchor(event, (before_ns + perf_counter_ns()) // 2)


def _recorded(module: Any, device: torch.device) -> Any:
    event = module.Event(enable_timing=True)
    event.record(module.current_stream(device))
    return event
