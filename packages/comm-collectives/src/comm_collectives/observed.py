"""A backend that times another one. Where nothing is observed it does not exist."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeVar, cast

import torch
from torch.distributed import ProcessGroup

from comm_utils.backend import Backend, Work
from comm_utils.comms_logger import CommsLogger
from comm_utils.sizes import message_size_bytes

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
_label: ContextVar[tuple[str | None, bool]] = ContextVar("comm_label", default=_NO_LABEL)
_PACKAGES = frozenset(("comm_collectives", "comm_orchestrator"))


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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def during(self, call: str, timeout: timedelta | None = None) -> Observed:
        return Observed(self.inner.during(call, timeout), self._log, call)

    def _observe(
        self,
        operation: str,
        group: ProcessGroup | None,
        part: torch.Tensor | None,
        call: Callable[..., T],
        *args: Any,
    ) -> T:
        log = self._log
        kind = self._kind(operation)
        log_name, prof = _label.get()
        name = log_name or kind
        if not (prof or log.wants(name)):
            return call(*args)
        W, ranks = self._members(group)
        size = 0 if part is None else message_size_bytes(operation, part.nbytes, W)
        caller = _caller() if log.debug else ""
        start = perf_counter_ns()
        outcome = call(*args)
        if outcome is None or isinstance(outcome, int):
            log.record(kind, size, perf_counter_ns() - start, W, caller, name, ranks)
            return outcome
        work: Any = _ObservedWork(outcome, lambda end: log.record(kind, size, end - start, W, caller, name, ranks))
        return cast(T, work)

    def _kind(self, operation: str) -> str:
        return self.call if self.call in KINDS.get(operation, ()) else operation

    def _members(self, group: ProcessGroup | None) -> tuple[int, tuple[int, ...]]:
        ranks = tuple(self.inner.get_process_group_ranks(group))
        return len(ranks), ranks

    def _plainly(
        self,
        operation: str,
        group: ProcessGroup | None,
        part: int | None,
        call: Callable[..., T],
        full: Callable[..., T],
    ) -> Callable[..., T]:
        """``call`` of tensors, of which number ``part`` counts, recorded at once; ``full`` where more is asked."""
        log, kind = self._log, self._kind(operation)
        W, ranks = self._members(group)
        known: dict[int, Callable[[int], None]] = {}
        now, label = perf_counter_ns, _label.get

        def recorded(*tensors: torch.Tensor) -> T:
            if not log.is_plain or label() is not _NO_LABEL:
                return full(*tensors)
            begin = now()
            outcome = call(*tensors)
            took_ns = now() - begin
            if outcome is False:
                return outcome
            part_bytes = 0 if part is None else tensors[part].nbytes
            add = known.get(part_bytes)
            if add is None:
                size = 0 if part is None else message_size_bytes(operation, part_bytes, W)
                add = known[part_bytes] = log.series(kind, size, W, ranks).add
            add(took_ns)
            return outcome

        return recorded

    def all_reduce(
        self, tensor: torch.Tensor, op: object = "sum", group: ProcessGroup | None = None, async_op: bool = False
    ) -> Work | None:
        return self._observe("all_reduce", group, tensor, self.inner.all_reduce, tensor, op, group, async_op)

    def prepare(
        self, operation: str, group: ProcessGroup | None = None, op: object = None, position: int | None = None
    ) -> Callable[..., None]:
        call = self.inner.prepare(operation, group, op, position)
        part = {"barrier": None, "reduce_scatter_tensor": 0}.get(operation, -1)

        def full(*tensors: torch.Tensor) -> None:
            self._observe(operation, group, None if part is None else tensors[part], call, *tensors)

        return self._plainly(operation, group, part, call, full)

    def shortest_all_reduce(
        self, group: ProcessGroup | None = None, op: object = "sum"
    ) -> Callable[[Any], bool] | None:
        shortest = self.inner.shortest_all_reduce(group, op)
        return None if shortest is None else self._plainly("all_reduce", group, 0, shortest, lambda *_: False)

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        op: object = "sum",
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        return self._observe("reduce", group, tensor, self.inner.reduce, tensor, dst, op, group, async_op, group_dst)

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        return self._observe("broadcast", group, tensor, self.inner.broadcast, tensor, src, group, async_op, group_src)

    def all_gather(
        self,
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        return self._observe("all_gather", group, tensor, self.inner.all_gather, tensor_list, tensor, group, async_op)

    def all_gather_into_tensor(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        call = self.inner.all_gather_into_tensor
        args = output_tensor, input_tensor, group, async_op
        return self._observe("all_gather_into_tensor", group, input_tensor, call, *args)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: object = "sum",
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        call = self.inner.reduce_scatter_tensor
        return self._observe("reduce_scatter_tensor", group, output, call, output, input, op, group, async_op)

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
        return self._observe("all_to_all_single", group, input, self.inner.all_to_all_single, *args)

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
        return self._observe("gather", group, tensor, self.inner.gather, *args)

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
        return self._observe("scatter", group, tensor, self.inner.scatter, *args)

    def barrier(
        self,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        device_ids: list[int] | None = None,
    ) -> Work | None:
        return self._observe("barrier", group, None, self.inner.barrier, group, async_op, device_ids)

    def send(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> None:
        self._observe("send", group, tensor, self.inner.send, tensor, dst, group, tag, group_dst)

    def recv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> int:
        return self._observe("recv", group, tensor, self.inner.recv, tensor, src, group, tag, group_src)

    def isend(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Work:
        return self._observe("isend", group, tensor, self.inner.isend, tensor, dst, group, tag, group_dst)

    def irecv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Work:
        return self._observe("irecv", group, tensor, self.inner.irecv, tensor, src, group, tag, group_src)

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[Work]:
        works = []
        for p2p, work in zip(p2p_op_list, self.inner.batch_isend_irecv(p2p_op_list), strict=False):
            works.append(self._observe(p2p.op.__name__, p2p.group, p2p.tensor, partial(_given, work)))
        return works


class _ObservedWork:
    """Records once, with the time at which the operation ended.

    A backend's handle may know that time (``ended_ns()``); otherwise the library calls back, or else it is when
    somebody has waited.
    """

    def __init__(self, work: Any, record: Callable[[int], None]) -> None:
        self._work = work
        self._record: Callable[[int], None] | None = record
        self._ended_ns: Callable[[], int | None] = getattr(work, "ended_ns", _unknown)
        if self._ended_ns is _unknown:
            with suppress(AttributeError, RuntimeError, NotImplementedError):  # a point-to-point handle has no future
                work.get_future().add_done_callback(self._done)

    def _done(self, future: Any) -> None:
        try:
            future.value()
        except Exception:  # a time that ended with a failure says nothing about the operation
            self._record = None
        self._recorded()

    def _recorded(self) -> None:
        record, self._record = self._record, None
        if record is not None:
            record(self._ended_ns() or perf_counter_ns())

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        done: bool = self._work.wait(timeout)
        self._recorded()
        return done

    def result(self) -> Any:
        self.wait()
        return self._work.result()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def __del__(self) -> None:
        # Nobody waited, and there was no callback.
        if getattr(self, "_record", None) is not None and self._ended_ns is not _unknown:
            with suppress(Exception):
                if self._ended_ns() is not None:
                    self._recorded()


def _unknown() -> None:
    return None


def _given(work: Work) -> Work:
    return work


def _caller() -> str:
    """The first function up the stack that is not ours."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PACKAGES:
        frame = frame.f_back
    return frame.f_code.co_name
