"""Records of operations on an accelerator: all their times, those of the waits too, are on the device's time line."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import torch

from comm_collectives.recorded.device_times import DeviceTimes
from comm_collectives.recorded.work import ObservedWork, RecordedKind
from comm_utils.observability.comms_logger import CommsLogger

__all__ = ["DeviceCall", "DeviceWork"]

# An event's time is accurate to half a microsecond. Below that, numbers keep operations apart that begin together, as
# their begin is how waits find them.
_RESOLUTION_NS = 500
_numbers = itertools.count()


class DeviceCall:
    """One call, whose times :class:`DeviceTimes` brings when the device has passed."""

    def __init__(self, log: CommsLogger, kind: RecordedKind, sequence: int) -> None:
        self._log, self._kind, self._sequence = log, kind, sequence
        self._trace = log.opened()
        self._begin_ns: int | None = None
        self._waits: list[tuple[int, int]] = []  # those that are known before the call's own times

    def ended(self, begin_ns: int, end_ns: int) -> None:
        """Record the call, which takes no time on the device before the operation begins."""
        log, kind = self._log, self._kind
        self._begin_ns = begin_ns = begin_ns + next(_numbers) % _RESOLUTION_NS
        end_ns = max(end_ns, begin_ns)
        returned_ns = begin_ns if kind.operation.asynchronous else None
        assert kind.series is not None
        kind.series.add_event(self._sequence, begin_ns, end_ns, returned_ns, kind.own)
        log.closed(self._trace)
        for wait in self._waits:
            self.waited(*wait)
        if log.verbose:
            log.line(kind.operation, end_ns - begin_ns)

    def failed(self) -> None:
        """Record nothing: a time that ended with a failure says nothing about the operation."""
        self._log.closed(self._trace)

    def waited(self, begin_ns: int, end_ns: int) -> None:
        """Record that the current stream waited for the operation."""
        if self._begin_ns is None:
            self._waits.append((begin_ns, end_ns))
        elif self._kind.series is not None:
            begin_ns = max(begin_ns, self._begin_ns)
            self._kind.series.add_wait(self._begin_ns, begin_ns, max(end_ns, begin_ns))


class DeviceWork(ObservedWork):
    """Records the first wait for ``call``, whose own times come with the library's future."""

    __slots__ = ("_call", "_device", "_devices")

    def __init__(
        self,
        work: Any,
        log: CommsLogger,
        kind: RecordedKind,
        call: DeviceCall,
        device: torch.device,
        devices: DeviceTimes,
    ) -> None:
        super().__init__(work, log, kind, None)
        self._call, self._device, self._devices = call, device, devices

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        start = None if self._waited or not self._log.writes else self._devices.start(self._device)
        done: bool = self._work.wait(timeout)
        if start is not None:
            self._devices.end(self._device, start, self._call.waited)
        self._waited = True
        return done
