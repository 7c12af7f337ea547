"""The wrapper that records what a backend does. Where nothing is recorded it does not exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup

from comm_collectives.composed import ONE_STEP, ComposedCall, Method
from comm_collectives.recorded.call_series import ANYBODY
from comm_collectives.recorded.device_times import DeviceTimes
from comm_collectives.recorded.fast_path import recorded_fast_path, splits_of
from comm_collectives.recorded.timed_calls import TimedCalls
from comm_collectives.recorded.work import ObservedWork
from comm_collectives.registered import recorded_method
from comm_utils.backend import Backend, Work
from comm_utils.fast_path import FastPath
from comm_utils.observability.comms_logger import CommsLogger

__all__ = ["Recording", "RecordingBackend"]


class RecordingBackend(TimedCalls):
    """Passes every call on to ``inner`` and records its time, from the call to the end of the operation.

    What it sees are the operations that travel. They are recorded under the name of the call that the user made where
    both are of one kind, so that sizes and bandwidths mean the same (``comm_utils.operations.record_name``), and under
    their own otherwise.
    The time of an asynchronous operation ends when the library reports it done, not when somebody waits.
    """

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if callable(found):  # an operation that another package added to the table
            found = self.__dict__[name] = recorded_method(name, found, self._observe)
        return found

    def fast_path(
        self, operation: str, detail: object = None, group: ProcessGroup | None = None, async_op: bool = False
    ) -> FastPath | None:
        if operation == "all_reduce_coalesced":  # which travels as several operations
            return None
        call = self.inner.fast_path(operation, detail, group, async_op)
        return None if call is None else recorded_fast_path(self, operation, detail, group, async_op, call)

    def observe_composed(
        self, call: ComposedCall, method: Method, started: Callable[[Backend], Work | None]
    ) -> Work | None:
        """Do what ``started`` does with the wrapped backend, compressed or in several steps; record it as ``call``."""
        kind = self._kind_of_composed(call, method)
        instead = None
        if method.was_plain is not None:
            instead = method.was_plain, self._kind_of_composed(call, ONE_STEP)
        begin, outcome, end = self._marked(kind, call.async_op, started, (self.inner,))
        if instead is not None and not call.async_op and instead[0]():
            kind = instead[1]
        series, counter, own, what = kind
        sequence = next(counter)
        if series is None:
            return outcome
        if call.async_op and outcome is not None:
            return ObservedWork(outcome, self._log, kind, (sequence, begin, end), instead)
        if own is None:
            series.add(sequence, begin, end)
        else:
            series.add_event(sequence, begin, end, None, own)
        if self._log.verbose:
            self._log.line(what, end - begin)
        return outcome

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
        # Only a trace has them, which may be written by the time that the operation ends.
        wanted = async_op or self._log.writes
        splits = splits_of(output, input, output_split_sizes, input_split_sizes) if wanted else None
        counts, call = self._counting(output, input), self.inner.all_to_all_single
        return self._observe("all_to_all_single", group, counts, call, args, async_op=async_op, splits=splits)

    def _counting(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """Return the size of an exchange: the larger one; for reductions the whole, which is equal everywhere."""
        return input if self.call.startswith("reduce_scatter") or output.nbytes <= input.nbytes else output

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
        device = p2p_op_list[0].tensor.device if p2p_op_list else torch.device("cpu")
        start = None if device.type == "cpu" else self._devices.start(device)
        begin = perf_counter_ns()
        works = self.inner.batch_isend_irecv(p2p_op_list)
        returned = perf_counter_ns()
        # A library may have one handle for all.
        each = works if len(works) == len(p2p_op_list) else works[:1] * len(p2p_op_list)
        found = [
            # No two begin at the same time, as that is how waits find what they were for.
            self._watched(p2p, work, begin + place, max(returned, begin + place), start)
            for place, (p2p, work) in enumerate(zip(p2p_op_list, each, strict=False))
        ]
        return found[: len(works)]


def _source(src: int | None, group_src: int | None) -> tuple[int | None, int | None]:
    return ANYBODY if src is None and group_src is None else (src, group_src)


class Recording:
    """Makes the wrapper that records into one logger, for ``comm_collectives.instrument``."""

    def __init__(self, log: CommsLogger) -> None:
        self.log = log
        self._devices = DeviceTimes()  # what is under way on devices outlives the wrapper

    def __call__(self, inner: Backend) -> Backend:
        self.log.when_reading(self._devices.collect)
        return cast(Backend, RecordingBackend(inner, self.log, self._devices))
