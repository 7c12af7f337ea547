"""Collectives by the process group's own methods.

``torch.distributed``'s functions repeat, in Python and at every call, checks that have been made already.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_backend_torch.fast_path import fast_path
from comm_backend_torch.starts import ON_ONE, STARTS, CallKind, device_of_barrier, result_of
from comm_backend_torch.waits import how_to_wait
from comm_backend_torch.work import TorchWork, left
from comm_backend_torch.world import World
from comm_utils.backend import Work
from comm_utils.fast_path import FastPath
from comm_utils.reduce_op import parse_reduce_op
from comm_utils.torch_support.group_state import GroupState
from comm_utils.torch_support.recorded_calls import Note, measure_of

__all__ = ["Collectives"]


class Collectives(World):
    """See ``comm_utils.backend.Backend`` for what every method does."""

    def all_reduce(
        self, tensor: torch.Tensor, op: object = "sum", group: ProcessGroup | None = None, async_op: bool = False
    ) -> Work | None:
        state = self._state(group)
        return self._call_c10d("all_reduce", state, tensor.device.type, (tensor,), async_op, op)

    def fast_path(
        self, operation: str, detail: object = None, group: ProcessGroup | None = None, async_op: bool = False
    ) -> FastPath | None:
        # The time of a view is of one call, and a fast path is for many.
        backend = self if self._end is None else self.during(self._call)
        return fast_path(backend if backend._call else backend.during(operation), operation, detail, group, async_op)

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        op: object = "sum",
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        state = self._state(group)
        root = state.position(dst, group_dst)
        return self._call_c10d("reduce", state, tensor.device.type, (tensor,), async_op, op, root)

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        state = self._state(group)
        root = state.position(src, group_src)
        return self._call_c10d("broadcast", state, tensor.device.type, (tensor,), async_op, None, root)

    def all_gather(
        self,
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        state = self._state(group)
        return self._call_c10d("all_gather", state, tensor.device.type, (tensor_list, tensor), async_op)

    def all_gather_into_tensor(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        state, tensors = self._state(group), (output_tensor, input_tensor)
        return self._call_c10d("all_gather_into_tensor", state, input_tensor.device.type, tensors, async_op)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: object = "sum",
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        state = self._state(group)
        return self._call_c10d("reduce_scatter_tensor", state, input.device.type, (output, input), async_op, op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        state, tensors = self._state(group), (output, input, output_split_sizes, input_split_sizes)
        return self._call_c10d("all_to_all_single", state, input.device.type, tensors, async_op)

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: list[torch.Tensor] | None = None,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        state = self._state(group)
        root = state.position(dst, group_dst)
        return self._call_c10d("gather", state, tensor.device.type, (tensor, gather_list), async_op, None, root)

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: list[torch.Tensor] | None = None,
        src: int | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        state = self._state(group)
        root = state.position(src, group_src)
        return self._call_c10d("scatter", state, tensor.device.type, (tensor, scatter_list), async_op, None, root)

    def barrier(
        self, group: ProcessGroup | None = None, async_op: bool = False, device_ids: list[int] | None = None
    ) -> Work | None:
        state = self._state(group)
        device = device_of_barrier(state, device_ids)
        return self._call_c10d("barrier", state, device, (), async_op, device_ids=device_ids)

    def _call_c10d(
        self,
        operation: str,
        state: GroupState,
        device: str,
        tensors: tuple[Any, ...],
        async_op: bool,
        op: object = None,
        root: int | None = None,
        device_ids: Sequence[int] | None = None,
    ) -> Work | None:
        """Start an operation as its fast path does, and wait for it unless it is asynchronous.

        Args:
            device: the type of device of its tensors.
            tensors: as a fast path takes them.
            root: a group rank.
        """
        call, timeout = self._call or operation, None if self._end is None else left(self._end)
        reduce_op = None if op is None else parse_reduce_op(op)
        kind = CallKind(operation, call, state, device, reduce_op, root, async_op, state.pg, timeout, device_ids)
        start: Any = STARTS[operation](kind)
        dtype, elements, sent, received = measure_of(operation, len(state.ranks))(*tensors)
        recorded = self._on_device(self._kind(operation, state, dtype, **kind.recorded), state, device)
        note = Note(recorded, recorded.begin(elements, 3, sent, received, self._state_of(async_op)), device)
        arguments = tensors if async_op or operation not in ON_ONE else ([*tensors],)
        own_wait, work = how_to_wait(state, device), None
        try:
            work = start(*arguments)
            if not async_op and work is not None:
                if own_wait is not None:
                    own_wait(work, self._end)
                elif self._end is None:
                    work.wait()
                else:
                    work.wait(left(self._end))
        except BaseException as error:
            failed = self._noted(error, operation, state, note, work)
            if failed is error:
                raise
            raise failed from error
        if async_op:
            failure = partial(self._failure, operation, state)
            return TorchWork(work, result_of(operation, tensors), failure, self._end, note, own_wait)
        note.end()
        return None
