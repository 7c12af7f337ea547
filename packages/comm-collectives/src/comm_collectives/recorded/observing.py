"""Timing and recording of one call, on the fast path and on the checked path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from datetime import timedelta
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeVar, cast

import torch
from torch.distributed import ProcessGroup

from comm_collectives.recorded.device_times import DeviceTimes
from comm_collectives.recorded.profiler_ranges import open_range
from comm_collectives.recorded.work import Like, ObservedWork
from comm_collectives.registered import recorded_method
from comm_utils.backend import Backend, Work
from comm_utils.observability.comms_logger import CommsLogger
from comm_utils.observability.series import NUMBERS_WAITING
from comm_utils.observability.traces.events import Operation
from comm_utils.reduce_op import parse_reduce_op
from comm_utils.sizes import message_size_bytes

__all__ = ["ANYBODY", "KINDS", "NO_ROOT", "Observing", "labelled"]

#: operation that travels -> calls under whose name it may be recorded
KINDS = {
    "all_reduce": ("inference_all_reduce", "all_reduce_coalesced"),
    "all_gather": ("all_gather_coalesced", "all_gather_into_tensor"),
    "all_gather_into_tensor": ("all_gather", "all_gather_coalesced"),
    "reduce_scatter_tensor": ("reduce_scatter", "reduce_scatter_coalesced"),
    "all_to_all_single": ("all_to_all", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_coalesced"),
}

T = TypeVar("T")
_S = TypeVar("_S", bound="Observing")
# (name to record under or None, whether to record in any case)
_NO_LABEL: tuple[str | None, bool] = (None, False)
#: Global rank and group rank of a root: there is none.
NO_ROOT: tuple[int | None, int | None] = (None, None)
#: The source of a message from any source.
ANYBODY: tuple[int | None, int | None] = (None, -1)
_label: ContextVar[tuple[str | None, bool]] = ContextVar("comm_label", default=_NO_LABEL)
_PACKAGES = frozenset(("comm_collectives", "comm_orchestrator"))
_MESSAGES = frozenset(("irecv", "isend", "recv", "send"))
# Under this in ``prepared``, which is emptied whenever a group ends: what is known of calls like one that was made.
_KNOWN = "observed"
_NOTHING_KNOWN: dict[object, Any] = {}
# So many different calls are remembered before all are forgotten.
_MOST_KNOWN = 4096


@contextmanager
def labelled(log_name: str | None = None, prof: bool = False) -> Iterator[None]:
    """Record what is communicated meanwhile under ``log_name``; with ``prof`` whatever the logger's settings say."""
    token = _label.set((log_name, prof))
    try:
        yield
    finally:
        _label.reset(token)


class Observing:
    """The recorder of calls of :class:`comm_collectives.recorded.backend.Observed`."""

    def __init__(self, inner: Backend, log: CommsLogger, devices: DeviceTimes, call: str = "") -> None:
        self.inner = inner
        self.call = call
        self.prepared = inner.prepared  # the same object, so that inner can empty it
        self._log = log
        self._devices = devices
        self._views: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if callable(found):  # the next look-up costs what it would cost there
            found = recorded_method(name, found, self._observe)
            self.__dict__[name] = found
        return found

    def during(self: _S, call: str, timeout: timedelta | None = None) -> _S:
        if timeout is not None:
            return type(self)(self.inner.during(call, timeout), self._log, self._devices, call)
        view: _S | None = self._views.get(call)
        if view is None:
            view = self._views[call] = type(self)(self.inner.during(call), self._log, self._devices, call)
        return view

    def _observe(
        self,
        operation: str,
        group: ProcessGroup | None,
        tensor: torch.Tensor | None,
        call: Callable[..., T],
        args: tuple[Any, ...],
        op: object = None,
        root: tuple[int | None, int | None] = NO_ROOT,
        tag: int = 0,
        async_op: bool = False,
        splits: dict[str, Any] | None = None,
    ) -> T:
        """Make the call and record it.

        Args:
            tensor: whose size counts; None for none.
            root: global rank, or group rank, of the root or of a message's other side.
            splits: fields of :class:`Operation` that are this call's alone.
        """
        log = self._log
        if tensor is not None and not tensor.is_cpu:
            return self._observe_on_device(operation, group, tensor, call, args, op, root, tag, async_op, splits)
        if log.is_plain and _label.get() is _NO_LABEL:
            begin = perf_counter_ns()
            outcome = call(*args)
            end = perf_counter_ns()
            known = self.prepared.get(_KNOWN, _NOTHING_KNOWN)
            dtype, size = (None, 0) if tensor is None else (tensor.dtype, tensor.nbytes)
            like = known.get((operation, size, dtype, group, op, root, tag, async_op, self.call))
            if like is None:
                like = self._like(operation, group, tensor, op, root, tag, async_op)
        else:
            like = self._like(operation, group, tensor, op, root, tag, async_op)
            begin, outcome, end = self._marked(like, async_op, call, args)
        if root is ANYBODY and operation == "recv":  # now we know
            like = self._like(operation, group, tensor, op, (cast(int, outcome), None), tag, async_op)
        series, counter, own, what = like
        sequence = next(counter)
        if series is None:
            return outcome
        if splits is not None:
            own = {**(own or {}), **splits}
            like = like._replace(own=own)
        if async_op and outcome is not None:
            watched: Any = ObservedWork(outcome, log, like, sequence, begin, end)
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
        operation: str,
        group: ProcessGroup | None,
        tensor: torch.Tensor,
        call: Callable[..., T],
        args: tuple[Any, ...],
        op: object,
        root: tuple[int | None, int | None],
        tag: int,
        async_op: bool,
        splits: dict[str, Any] | None,
    ) -> T:
        log, devices, device = self._log, self._devices, tensor.device
        like = self._like(operation, group, tensor, op, root, tag, async_op)
        start = None if like.series is None else devices.start(device)
        begin, outcome, returned = self._marked(like, async_op, call, args)
        if root is ANYBODY and operation == "recv":
            like = self._like(operation, group, tensor, op, (cast(int, outcome), None), tag, async_op)
        sequence = next(like.counter)
        if start is None:
            return outcome
        own = like.own if splits is None else {**(like.own or {}), **splits}
        devices.collect()
        if async_op and outcome is not None:
            watched: Any = self._watched_on_device(
                outcome, device, start, like._replace(own=own), sequence, begin, returned
            )
            return cast(T, watched)
        devices.end(device, start, partial(_on_device, log, like, own, sequence, None))
        return outcome

    def _watched_on_device(
        self, work: Any, device: torch.device, start: Any, like: Like, sequence: int, begin: int, returned: int
    ) -> ObservedWork:
        try:
            future = work.get_future()
        except (AttributeError, RuntimeError, NotImplementedError):  # it ends when somebody has waited
            return ObservedWork(work, self._log, like, sequence, begin, returned)
        done = partial(_on_device, self._log, like, like.own, sequence, returned)
        self._devices.end_with(device, start, future, done)
        return ObservedWork(work, self._log, like, sequence, begin, returned, timed=True)

    def _marked(self, like: Like, async_op: bool, call: Callable[..., T], args: tuple[Any, ...]) -> tuple[int, T, int]:
        """Make the call, within a range where that is asked for; when it began and ended, and what it returned."""
        if not self._log.ranges or like.series is None:
            begin = perf_counter_ns()
            outcome = call(*args)
            return begin, outcome, perf_counter_ns()
        what = like.operation
        with open_range(what.operation, what.size_bytes, what.ranks, async_op):
            begin = perf_counter_ns()
            outcome = call(*args)
            return begin, outcome, perf_counter_ns()

    def _like(
        self,
        operation: str,
        group: ProcessGroup | None,
        tensor: torch.Tensor | None,
        op: object,
        root: tuple[int | None, int | None],
        tag: int,
        async_op: bool,
    ) -> Like:
        """Return what is recorded of calls like this one."""
        log, label = self._log, _label.get()
        known = self.prepared.get(_KNOWN)
        if known is None:
            known = self.prepared[_KNOWN] = {}
        usual = log.is_plain and label is _NO_LABEL
        dtype, size = (None, 0) if tensor is None else (tensor.dtype, tensor.nbytes)
        key = (operation, size, dtype, group, op, root, tag, async_op, self.call)
        if usual:
            found: Like | None = known.get(key)
            if found is not None:
                return found
        made = self._new_like(label, operation, group, tensor, op, root, tag, async_op)
        # Settings may have changed meanwhile, in another thread.
        if usual and made.series is not None:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known[key] = made
        return made

    def _new_like(
        self,
        label: tuple[str | None, bool],
        operation: str,
        group: ProcessGroup | None,
        tensor: torch.Tensor | None,
        op: object,
        root: tuple[int | None, int | None],
        tag: int,
        async_op: bool,
    ) -> Like:
        log, (log_name, prof) = self._log, label
        kind = self.call if self.call in KINDS.get(operation, ()) else operation
        ranks = tuple(self.inner.get_process_group_ranks(group))
        # Groups without a name are those of other threads' worlds, in tests.
        group_name = str(getattr(self.inner.get_world_group() if group is None else group, "group_name", ""))
        other = root[0] if root[0] is not None else -1 if root[1] is None or root[1] < 0 else ranks[root[1]]
        channel: tuple[object, ...] = (group_name, ranks)
        within = None
        if operation in _MESSAGES:
            own_rank = self.inner.get_rank(None)
            sends = operation.endswith("send")
            if not sends:
                within = (*channel, tag)
                if operation == "irecv" and other < 0 and log.numbering.make_vague(within):
                    # Which message it gets is nobody's knowledge, nor then which the later ones get.
                    self.prepared.clear()
            channel = (*channel, *((own_rank, other) if sends else (other, own_rank)), tag)
        counter = log.numbering.counter(channel, within)
        size = 0 if tensor is None else message_size_bytes(operation, tensor.nbytes, len(ranks))
        what = Operation(
            name=log_name or kind,
            operation=kind,
            size_bytes=size,
            ranks=ranks,
            group=group_name,
            dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
            op="" if op is None else parse_reduce_op(op).name.lower(),
            root=other,
            tag=tag,
            asynchronous=async_op,
            caller=_caller() if log.debug else "",
            on_device=tensor is not None and not tensor.is_cpu,
        )
        if not (prof or log.wants(what.name)):
            return Like(None, counter, None, what)
        series = log.series(what)
        return Like(series, counter, _own(what, series.operation), what)

    def _plainly(
        self,
        operation: str,
        group: ProcessGroup | None,
        part: int | None,
        call: Callable[..., T],
        op: object,
        root: tuple[int | None, int | None],
        any_dtype: bool = False,
        apart: tuple[Callable[..., Any], Callable[[Any], None]] | None = None,
    ) -> Callable[..., Any]:
        """``call`` of tensors, of which number ``part`` counts, recorded on the fast path.

        It takes the place of a call that the collectives have prepared, so it may cost as little as can be.

        Args:
            any_dtype: the tensors are not all of one dtype and on one device.
            apart: what ``Backend.prepare_apart`` returned for the same.
        """
        log, like_of, observe = self._log, self._like, self._observe
        known: dict[object, tuple[int, Iterator[int]]] = {}
        now, label = perf_counter_ns, _label.get
        recorder = log.recorder
        waiting = recorder.waiting
        wait = waiting.extend

        def remembered(key: object, tensor: torch.Tensor | None) -> Like:
            like = like_of(operation, group, tensor, op, root, 0, False)
            if like.series is not None and like.own is None:  # settings may have changed, in another thread
                if len(known) >= _MOST_KNOWN:
                    known.clear()
                known[key] = like.series.number, like.counter
            return like

        def recorded(*tensors: torch.Tensor) -> T:
            tensor = None if part is None else tensors[part]
            if not log.is_plain or label() is not _NO_LABEL:
                return observe(operation, group, tensor, call, tensors, op, root)
            # Looked up before the call, which may leave little in the caches.
            key = 0 if tensor is None else (tensor.dtype, tensor.nbytes) if any_dtype else tensor.nbytes
            found = known.get(key)
            if found is None and tensor is not None and not tensor.is_cpu:
                return observe(operation, group, tensor, call, tensors, op, root)
            begin = now()
            outcome = call(*tensors)
            end = now()
            if outcome is False:
                return outcome
            if found is None:
                like = remembered(key, tensor)
                like.add(next(like.counter), begin, end)
                return outcome
            wait((found[0], next(found[1]), begin, end))
            if len(waiting) >= NUMBERS_WAITING or end > recorder.due_ns:
                recorder.settle()
            return outcome

        if apart is None:
            return recorded
        start, finish = apart

        def recorded_meanwhile(*tensors: torch.Tensor) -> T | None:
            tensor = None if part is None else tensors[part]
            if (
                not log.is_plain
                or label() is not _NO_LABEL
                or (tensor is not None and not known and not tensor.is_cpu)  # and then neither are the later ones
            ):
                return observe(operation, group, tensor, call, tensors, op, root)
            begin = now()
            work = start(*tensors)
            # The library is at work.
            key = 0 if tensor is None else tensor.nbytes
            found = known.get(key)
            if found is None:
                like = remembered(key, tensor)
                finish(work)
                like.add(next(like.counter), begin, now())
                return None
            number, sequence = found[0], next(found[1])
            finish(work)
            end = now()
            wait((number, sequence, begin, end))
            if len(waiting) >= NUMBERS_WAITING or end > recorder.due_ns:
                recorder.settle()
            return None

        return recorded_meanwhile

    def _watched(self, p2p: Any, work: Work, begin: int, returned: int, start: Any) -> Work:
        root = p2p.peer, getattr(p2p, "group_peer", None)
        like = self._like(p2p.op.__name__, p2p.group, p2p.tensor, None, root, p2p.tag, True)
        sequence = next(like.counter)
        if like.series is None:
            return work
        if start is not None:
            device = p2p.tensor.device
            return cast(Work, self._watched_on_device(work, device, start, like, sequence, begin, returned))
        return cast(Work, ObservedWork(work, self._log, like, sequence, begin, returned))


def _on_device(
    log: CommsLogger,
    like: Like,
    own: dict[str, Any] | None,
    sequence: int,
    returned: int | None,
    begin: int,
    end: int,
) -> None:
    if like.series is not None:
        like.series.add_event(sequence, begin, end, returned, own)
    if log.verbose:
        log.line(like.operation, end - begin)


def _own(what: Operation, of_series: Operation) -> dict[str, Any] | None:
    """Return what is this operation's alone, where others are recorded in the same series."""
    if what == of_series:
        return None
    return {
        one.name: value
        for one in fields(Operation)
        if (value := getattr(what, one.name)) != getattr(of_series, one.name)
    }


def _caller() -> str:
    """Return the first function up the stack that is not ours."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PACKAGES:
        frame = frame.f_back
    return frame.f_code.co_name
