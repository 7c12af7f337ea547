"""Collectives by the process group's own methods.

``torch.distributed``'s functions repeat, in Python and at every call, checks that have been made already.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as internals

from comm_backend_torch.fast_path import fast_path
from comm_backend_torch.reduce_ops import OptionsTable, op_name
from comm_backend_torch.starts import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from comm_backend_torch.world import World
from comm_utils.backend import Work
from comm_utils.fast_path import FastPath
from comm_utils.torch_support.recorded_calls import exchanged

__all__ = ["Collectives"]


class Collectives(World):
    """See ``comm_utils.backend.Backend`` for what every method does."""

    def __init__(self, timeout: timedelta | None = None) -> None:
        super().__init__(timeout)
        self._all_reduce = OptionsTable(internals.AllreduceOptions, async_op=False)
        self._all_reduce_async = OptionsTable(internals.AllreduceOptions, async_op=True)

    def all_reduce(
        self, tensor: torch.Tensor, op: object = "sum", group: ProcessGroup | None = None, async_op: bool = False
    ) -> Work | None:
        state = self._state(group)
        options = (self._all_reduce_async if async_op else self._all_reduce)[op]
        if self._end is not None:
            reduction, options = options.reduceOp, self._options(internals.AllreduceOptions, async_op)
            options.reduceOp = reduction
        note = self._note("all_reduce", state, tensor, tensor.numel(), op_name(op), background=async_op)
        work = self._start("all_reduce", state, note, state.pg.allreduce, [tensor], options)
        return self._finish("all_reduce", work, tensor, state, async_op, note)

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
        options = self._options(internals.ReduceOptions, async_op)
        options.reduceOp = self._all_reduce[op].reduceOp
        options.rootRank = root = state.position(dst, group_dst)
        note = self._note("reduce", state, tensor, tensor.numel(), op_name(op), root, async_op)
        work = self._start("reduce", state, note, state.pg.reduce, [tensor], options)
        return self._finish("reduce", work, tensor, state, async_op, note)

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        state = self._state(group)
        options = self._options(internals.BroadcastOptions, async_op)
        options.rootRank = root = state.position(src, group_src)
        options.rootTensor = 0
        note = self._note("broadcast", state, tensor, tensor.numel(), "", root, async_op)
        work = self._start("broadcast", state, note, state.pg.broadcast, [tensor], options)
        return self._finish("broadcast", work, tensor, state, async_op, note)

    def all_gather(
        self,
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        state = self._state(group)
        options = self._options(internals.AllgatherOptions, async_op)
        note = self._note("all_gather", state, tensor, tensor.numel(), background=async_op)
        work = self._start("all_gather", state, note, state.pg.allgather, [tensor_list], [tensor], options)
        return self._finish("all_gather", work, tensor_list, state, async_op, note)

    def all_gather_into_tensor(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        state = self._state(group)
        method, name = getattr(state.pg, ALL_GATHER), "all_gather_into_tensor"
        options = self._options(internals.AllgatherOptions, async_op)
        note = self._note(name, state, input_tensor, input_tensor.numel(), background=async_op)
        work = self._start(name, state, note, method, output_tensor, input_tensor, options)
        return self._finish(name, work, output_tensor, state, async_op, note)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: object = "sum",
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        state = self._state(group)
        method, name = getattr(state.pg, REDUCE_SCATTER), "reduce_scatter_tensor"
        options = self._options(internals.ReduceScatterOptions, async_op)
        options.reduceOp = self._all_reduce[op].reduceOp
        note = self._note(name, state, output, output.numel(), op_name(op), background=async_op)
        work = self._start(name, state, note, method, output, input, options)
        return self._finish(name, work, output, state, async_op, note)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        state = self._state(group)
        method, name = getattr(state.pg, ALL_TO_ALL), "all_to_all_single"
        options = self._options(internals.AllToAllOptions, async_op)
        rows_out, rows_in = list(output_split_sizes or ()), list(input_split_sizes or ())
        elements, sent, received = exchanged(output, input, rows_out, rows_in, len(state.ranks))
        note = self._note(name, state, input, elements, background=async_op, sent=sent, received=received)
        work = self._start(name, state, note, method, output, input, rows_out, rows_in, options)
        return self._finish(name, work, output, state, async_op, note)

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
        options = self._options(internals.GatherOptions, async_op)
        options.rootRank = root = state.position(dst, group_dst)
        outputs = [gather_list] if gather_list else []
        note = self._note("gather", state, tensor, tensor.numel(), "", root, async_op)
        work = self._start("gather", state, note, state.pg.gather, outputs, [tensor], options)
        return self._finish("gather", work, gather_list, state, async_op, note)

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
        options = self._options(internals.ScatterOptions, async_op)
        options.rootRank = root = state.position(src, group_src)
        inputs = [scatter_list] if scatter_list else []
        note = self._note("scatter", state, tensor, tensor.numel(), "", root, async_op)
        work = self._start("scatter", state, note, state.pg.scatter, [tensor], inputs, options)
        return self._finish("scatter", work, tensor, state, async_op, note)

    def barrier(
        self, group: ProcessGroup | None = None, async_op: bool = False, device_ids: list[int] | None = None
    ) -> Work | None:
        state = self._state(group)
        options = self._barrier_options(state.pg, async_op)
        if device_ids is not None:
            options.device_ids = device_ids
        note = self._note("barrier", state, background=async_op)
        work = self._start("barrier", state, note, state.pg.barrier, options)
        return self._finish("barrier", work, None, state, async_op, note)

    def _barrier_options(self, pg: ProcessGroup, async_op: bool) -> Any:
        options = self._options(internals.BarrierOptions, async_op)
        # torch picks the accelerator where the group serves one, as its own function does.
        libraries = self._state(pg).libraries
        device = next((device for device in libraries if device != "cpu"), "cpu")
        if hasattr(options, "device") and "cpu" not in libraries:
            options.device = torch.device(device)
        return options
