"""The timing and recording of one call, on the fast path and on the checked path."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, TypeVar, cast

import torch
from torch.distributed import ProcessGroup

from comm_collectives import labels
from comm_collectives.composed import NO_ROOT, Root
from comm_collectives.labels import NO_LABEL
from comm_collectives.recorded.call_series import ANYBODY, CallArguments, CallSeries
from comm_collectives.recorded.device_work import DeviceCall, DeviceWork
from comm_collectives.recorded.profiler_ranges import open_range
from comm_collectives.recorded.work import ObservedWork, RecordedKind
from comm_utils.backend import Work

__all__ = ["TimedCalls"]

T = TypeVar("T")


class TimedCalls(CallSeries):
    """The part of :class:`comm_collectives.recorded.backend.RecordingBackend` that makes and times calls."""

    def _observe(
        self,
        operation: str,
        group: ProcessGroup | None,
        tensor: Any,
        call: Callable[..., T],
        args: tuple[Any, ...],
        op: object = None,
        root: Root = NO_ROOT,
        tag: int = 0,
        async_op: bool = False,
        splits: dict[str, Any] | None = None,
        is_fast: bool = False,
    ) -> T:
        """Make the call and record it.

        Args:
            tensor: whose size counts, or its ``Payload``; None for none.
            root: global rank, or group rank, of the root or of a message's other side.
            splits: fields of :class:`Operation` that are this call's alone.
            is_fast: ``call`` is a fast path, which may refuse; nothing is recorded then.
        """
        log = self._log
        if tensor is not None and not tensor.is_cpu:
            described = CallArguments(operation, group, tensor, op, root, tag, async_op)
            return self._observe_on_device(described, call, args, splits, is_fast)
        if log.is_plain and labels.label.get() is NO_LABEL:
            begin = perf_counter_ns()
            outcome = call(*args)
            end = perf_counter_ns()
            if is_fast and not outcome:
                return outcome
            dtype, size = (None, 0) if tensor is None else (tensor.dtype, tensor.nbytes)
            kind = self._known.get((operation, size, dtype, group, op, root, tag, async_op, self.call))
            if kind is None:
                kind = self._kind_of(operation, group, tensor, op, root, tag, async_op)
        else:
            kind = self._kind_of(operation, group, tensor, op, root, tag, async_op)
            begin, outcome, end = self._marked(kind, async_op, call, args)
            if is_fast and not outcome:
                return outcome
        if root is ANYBODY and operation == "recv":  # now we know
            kind = self._kind_of(operation, group, tensor, op, (cast(int, outcome), None), tag, async_op)
        series, counter, own, what = kind
        sequence = next(counter)
        if series is None:
            return outcome
        if splits is not None:
            own = {**(own or {}), **splits}
            kind = kind._replace(own=own)
        if async_op and outcome is not None:
            watched: Any = ObservedWork(outcome, log, kind, (sequence, begin, end))
            outcome = watched  # a T; a cast() would be one more call
            return outcome
        if own is None:
            series.add(sequence, begin, end)
        else:
            series.add_event(sequence, begin, end, None, own)
        if log.verbose:
            log.line(what, end - begin)
        return outcome

    def _observe_on_device(
        self,
        described: CallArguments,
        call: Callable[..., T],
        args: tuple[Any, ...],
        splits: dict[str, Any] | None,
        is_fast: bool,
    ) -> T:
        log, devices, device, async_op = self._log, self._devices, described.tensor.device, described.async_op
        kind = self._kind_of(*described)
        start = None if kind.series is None else devices.start(device)
        begin, outcome, returned = self._marked(kind, async_op, call, args)
        if is_fast and not outcome:
            return outcome
        if described.root is ANYBODY and described.operation == "recv":
            kind = self._kind_of(*described._replace(root=(cast(int, outcome), None)))
        sequence = next(kind.counter)
        if start is None:
            return outcome
        if splits is not None:
            kind = kind._replace(own={**(kind.own or {}), **splits})
        devices.collect()
        if async_op and outcome is not None:
            watched: Any = self._watched_on_device(outcome, device, start, kind, (sequence, begin, returned))
            return cast(T, watched)
        devices.end(device, start, DeviceCall(log, kind, sequence).ended)
        return outcome

    def _watched_on_device(
        self, work: Any, device: torch.device, start: Any, kind: RecordedKind, event: tuple[int, int, int]
    ) -> ObservedWork:
        try:
            future = work.library_future()
        except (AttributeError, RuntimeError, NotImplementedError):  # it ends when somebody has waited
            return ObservedWork(work, self._log, kind, event)
        call = DeviceCall(self._log, kind, event[0])
        self._devices.end_with(device, start, future, call.ended, call.failed)
        return DeviceWork(work, self._log, kind, call, device, self._devices)

    def _marked(
        self, kind: RecordedKind, async_op: bool, call: Callable[..., T], args: tuple[Any, ...]
    ) -> tuple[int, T, int]:
        """Make the call, within a range where that is asked for; when it began and ended, and what it returned."""
        if not self._log.ranges or kind.series is None:
            begin = perf_counter_ns()
            outcome = call(*args)
            return begin, outcome, perf_counter_ns()
        what = kind.operation
        with open_range(what.operation, what.size_bytes, what.ranks, async_op):
            begin = perf_counter_ns()
            outcome = call(*args)
            return begin, outcome, perf_counter_ns()

    def _watched(self, p2p: Any, work: Work, begin: int, returned: int, start: Any) -> Work:
        root = p2p.peer, getattr(p2p, "group_peer", None)
        kind = self._kind_of(p2p.op.__name__, p2p.group, p2p.tensor, None, root, p2p.tag, True)
        event = next(kind.counter), begin, returned
        if kind.series is None:
            return work
        if start is not None:
            return cast(Work, self._watched_on_device(work, p2p.tensor.device, start, kind, event))
        return cast(Work, ObservedWork(work, self._log, kind, event))
