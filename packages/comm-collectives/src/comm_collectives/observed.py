"""A backend that times another one. Where nothing is observed it does not exist."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from time import perf_counter_ns
from typing import Any, TypeVar, cast

import torch
from torch.distributed import ProcessGroup

from comm_collectives.observed_work import Like, ObservedWork
from comm_collectives.ranges import open_range
from comm_utils.backend import Backend, Work
from comm_utils.comms_logger import CommsLogger
from comm_utils.reduce_op import parse_reduce_op
from comm_utils.sizes import message_size_bytes
from comm_utils.traces.events import Operation

__all__ = ["KINDS", "Observed", "labelled"]

#: operation that travels -> calls under whose name it may be recorded
KINDS = {
    "all_reduce": ("inference_all_reduce", "all_reduce_coalesced"),
    "all_gather": ("all_gather_coalesced", "all_gather_into_tensor"),
    "all_gather_into_tensor": ("all_gather", "all_gather_coalesced"),
    "reduce_scatter_tensor": ("reduce_scatter", "reduce_scatter_coalesced"),
    "all_to_all_single": ("all_to_all", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_coalesced"),
}

T = TypeVar("T")
# (name to record under or None, whether to record in any case)
_NO_LABEL: tuple[str | None, bool] = (None, False)
# Global rank and group rank.
_NO_ROOT: tuple[int | None, int | None] = (None, None)
_ANYBODY: tuple[int | None, int | None] = (None, -1)
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


class Observed:
    """Passes every call on to ``inner`` and records its time, from the call to the end of the operation.

    What it sees are the operations that travel. They are recorded under the name of the call that the user made where
    both are of one kind, so that sizes and bandwidths mean the same (:data:`KINDS`), and under their own otherwise.
    The time of an asynchronous operation ends when the library reports it done, not when somebody waits.
    """

    def __init__(self, inner: Backend, log: CommsLogger, call: str = "") -> None:
        self.inner = inner
        self.call = call
        self.prepared = inner.prepared  # the same object, so that inner can empty it
        self._log = log
        self._views: dict[str, Observed] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if callable(found):  # the next look-up costs what it would cost there
            self.__dict__[name] = found
        return found

    def during(self, call: str, timeout: timedelta | None = None) -> Observed:
        if timeout is not None:
            return Observed(self.inner.during(call, timeout), self._log, call)
        view = self._views.get(call)
        if view is None:
            view = self._views[call] = Observed(self.inner.during(call), self._log, call)
        return view

    def _observe(
        self,
        operation: str,
        group: ProcessGroup | None,
        tensor: torch.Tensor | None,
        call: Callable[..., T],
        args: tuple[Any, ...],
        op: object = None,
        root: tuple[int | None, int | None] = _NO_ROOT,
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
        if root is _ANYBODY and operation == "recv":  # now we know
            like = self._like(operation, group, tensor, op, (cast(int, outcome), None), tag, async_op)
        series, counter, own, what = like
        sequence = next(counter)
        if series is None:
            return outcome
        if splits is not None:
            own = {**(own or {}), **splits}
        if async_op and outcome is not None:
            work: Any = ObservedWork(outcome, log, like._replace(own=own), sequence, begin, end)
            return cast(T, work)
        if own is None:
            series.add(sequence, begin, end)
        else:
            series.add_event(sequence, begin, end, None, own)
        if log.verbose:
            log.line(what, end - begin)
        return outcome

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
            end = perf_counter_ns()
        return begin, outcome, end

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
        """What is recorded of calls like this one."""
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
        if usual:
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
        if operation in _MESSAGES:
            own_rank = self.inner.get_rank(None)
            ends = (own_rank, other) if operation.endswith("send") else (other, own_rank)
            channel = (*channel, *ends, tag)
        counter = log.counter(channel)
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
        )
        if not (prof or log.wants(what.name)):
            return Like(None, counter, None, what)
        series = log.series(what)
        exact = series.operation.size_bytes == size
        return Like(series, counter, None if exact else {"size_bytes": size}, what)

    def prepare(
        self, operation: str, group: ProcessGroup | None = None, op: object = None, position: int | None = None
    ) -> Callable[..., None]:
        call = self.inner.prepare(operation, group, op, position)
        part = {"barrier": None, "reduce_scatter_tensor": 0}.get(operation, -1)
        return self._plainly(operation, group, part, call, op, (None, position))

    def shortest_all_reduce(
        self, group: ProcessGroup | None = None, op: object = "sum"
    ) -> Callable[[Any], bool] | None:
        shortest = self.inner.shortest_all_reduce(group, op)
        return None if shortest is None else self._plainly("all_reduce", group, 0, shortest, op, _NO_ROOT)

    def _plainly(
        self,
        operation: str,
        group: ProcessGroup | None,
        part: int | None,
        call: Callable[..., T],
        op: object,
        root: tuple[int | None, int | None],
    ) -> Callable[..., T]:
        """``call`` of tensors, of which number ``part`` counts, recorded the shortest way.

        It takes the place of a call that the collectives have prepared, so it may cost as little as can be.
        """
        log, like_of, observe = self._log, self._like, self._observe
        known: dict[tuple[torch.dtype | None, int], Any] = {}
        now, label = perf_counter_ns, _label.get
        what = operation, group

        def recorded(*tensors: torch.Tensor) -> T:
            if not log.is_plain or label() is not _NO_LABEL:
                tensor = None if part is None else tensors[part]
                return observe(*what, tensor, call, tensors, op, root)
            begin = now()
            outcome = call(*tensors)
            end = now()
            if outcome is False:
                return outcome
            if part is None:
                key: tuple[torch.dtype | None, int] = (None, 0)
            else:
                tensor = tensors[part]
                key = (tensor.dtype, tensor.nbytes)
            found = known.get(key)
            if found is None:
                like = like_of(*what, None if part is None else tensors[part], op, root, 0, False)
                if len(known) >= _MOST_KNOWN:
                    known.clear()
                assert like.series is not None
                found = known[key] = like.series.add if like.own is None else like.add, like.counter
            found[0](next(found[1]), begin, end)
            return outcome

        return recorded

    def all_reduce(
        self, tensor: torch.Tensor, op: object = "sum", group: ProcessGroup | None = None, async_op: bool = False
    ) -> Work | None:
        args = tensor, op, group, async_op
        return self._observe("all_reduce", group, tensor, self.inner.all_reduce, args, op, async_op=async_op)

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        op: object = "sum",
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        args = tensor, dst, op, group, async_op, group_dst
        root = dst, group_dst
        return self._observe("reduce", group, tensor, self.inner.reduce, args, op, root, async_op=async_op)

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        args = tensor, src, group, async_op, group_src
        root = src, group_src
        return self._observe("broadcast", group, tensor, self.inner.broadcast, args, None, root, async_op=async_op)

    def all_gather(
        self,
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        args = tensor_list, tensor, group, async_op
        return self._observe("all_gather", group, tensor, self.inner.all_gather, args, async_op=async_op)

    def all_gather_into_tensor(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        call = self.inner.all_gather_into_tensor
        args = output_tensor, input_tensor, group, async_op
        return self._observe("all_gather_into_tensor", group, input_tensor, call, args, async_op=async_op)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: object = "sum",
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        call = self.inner.reduce_scatter_tensor
        args = output, input, op, group, async_op
        return self._observe("reduce_scatter_tensor", group, output, call, args, op, async_op=async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        args = output, input, output_split_sizes, input_split_sizes, group, async_op
        splits = _splits(output, input, output_split_sizes, input_split_sizes)
        larger = output if output.nbytes > input.nbytes else input
        call = self.inner.all_to_all_single
        return self._observe("all_to_all_single", group, larger, call, args, async_op=async_op, splits=splits)

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: list[torch.Tensor] | None = None,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        args = tensor, gather_list, dst, group, async_op, group_dst
        root = dst, group_dst
        return self._observe("gather", group, tensor, self.inner.gather, args, None, root, async_op=async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: list[torch.Tensor] | None = None,
        src: int | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        args = tensor, scatter_list, src, group, async_op, group_src
        root = src, group_src
        return self._observe("scatter", group, tensor, self.inner.scatter, args, None, root, async_op=async_op)

    def barrier(
        self,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        device_ids: list[int] | None = None,
    ) -> Work | None:
        args = group, async_op, device_ids
        return self._observe("barrier", group, None, self.inner.barrier, args, async_op=async_op)

    def send(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> None:
        args = tensor, dst, group, tag, group_dst
        self._observe("send", group, tensor, self.inner.send, args, None, (dst, group_dst), tag)

    def recv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> int:
        args = tensor, src, group, tag, group_src
        return self._observe("recv", group, tensor, self.inner.recv, args, None, _source(src, group_src), tag)

    def isend(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Work:
        args = tensor, dst, group, tag, group_dst
        return self._observe("isend", group, tensor, self.inner.isend, args, None, (dst, group_dst), tag, True)

    def irecv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Work:
        args = tensor, src, group, tag, group_src
        return self._observe("irecv", group, tensor, self.inner.irecv, args, None, _source(src, group_src), tag, True)

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[Work]:
        begin = perf_counter_ns()
        works = self.inner.batch_isend_irecv(p2p_op_list)
        returned = perf_counter_ns()
        if len(works) != len(p2p_op_list):  # the library has one handle for all
            return works
        return [self._watched(p2p, work, begin, returned) for p2p, work in zip(p2p_op_list, works, strict=True)]

    def _watched(self, p2p: Any, work: Work, begin: int, returned: int) -> Work:
        root = p2p.peer, getattr(p2p, "group_peer", None)
        like = self._like(p2p.op.__name__, p2p.group, p2p.tensor, None, root, p2p.tag, True)
        sequence = next(like.counter)
        if like.series is None:
            return work
        watched: Any = ObservedWork(work, self._log, like, sequence, begin, returned)
        return cast(Work, watched)


def _source(src: int | None, group_src: int | None) -> tuple[int | None, int | None]:
    return _ANYBODY if src is None and group_src is None else (src, group_src)


def _splits(
    output: torch.Tensor, input: torch.Tensor, rows_out: Sequence[int] | None, rows_in: Sequence[int] | None
) -> dict[str, Any] | None:
    """Uneven parts of an exchange, in elements."""
    if not rows_out and not rows_in:
        return None
    found = {}
    for name, tensor, rows in (("input_splits", input, rows_in), ("output_splits", output, rows_out)):
        if rows:
            in_row = tensor.numel() // max(tensor.shape[0], 1)
            found[name] = [number * in_row for number in rows]
    return found


def _caller() -> str:
    """The first function up the stack that is not ours."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PACKAGES:
        frame = frame.f_back
    return frame.f_code.co_name
