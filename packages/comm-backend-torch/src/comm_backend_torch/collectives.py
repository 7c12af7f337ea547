"""Collectives by the process group's own methods.

``torch.distributed``'s functions repeat, in Python and at every call, checks that have been made already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as internals

from comm_backend_torch.reduce_ops import OptionsTable, set_async
from comm_backend_torch.work import TorchWork
from comm_backend_torch.world import World
from comm_utils.backend import Work

__all__ = ["Collectives"]

# torch 2.13 renamed the flat collectives of the process group; the old names go through the new ones.
_NEW_NAMES = hasattr(ProcessGroup, "all_gather_single")
_ALL_GATHER = "all_gather_single" if _NEW_NAMES else "_allgather_base"
_REDUCE_SCATTER = "reduce_scatter_single" if _NEW_NAMES else "_reduce_scatter_base"
_ALL_TO_ALL = "all_to_all_single" if _NEW_NAMES else "alltoall_base"


class Collectives(World):
    """See ``comm_utils.backend.Backend`` for what every method does."""

    def __init__(self, timeout: timedelta | None = None) -> None:
        super().__init__(timeout)
        self._all_reduce = OptionsTable(internals.AllreduceOptions, async_op=False)
        self._all_reduce_async = OptionsTable(internals.AllreduceOptions, async_op=True)

    def all_reduce(
        self, tensor: torch.Tensor, op: object = "sum", group: ProcessGroup | None = None, async_op: bool = False
    ) -> Work | None:
        pg: Any = internals._world.default_pg if group is None else group
        try:
            if async_op:
                work = pg.allreduce([tensor], self._all_reduce_async[op])
                return TorchWork(work, tensor, partial(self._failure, "all_reduce", group))
            work = pg.allreduce([tensor], self._all_reduce[op])
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise self._failure("all_reduce", group, error) from error
        return None

    def prepare_all_reduce(
        self, op: object = "sum", group: ProcessGroup | None = None
    ) -> Callable[[torch.Tensor], None]:
        world, pg = internals._world, self._state(group).pg
        this = self.during("all_reduce")  # inference_all_reduce goes the same way
        allreduce, options = pg.allreduce, self._all_reduce[op]

        def call(tensor: torch.Tensor) -> None:
            if (
                group is None and world.default_pg is not pg
            ):  # destroyed, and perhaps made anew, through torch.distributed
                this.prepared.clear()
                this._state(None)
                this.all_reduce(tensor, op)
                return
            try:
                work = allreduce([tensor], options)
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                raise this._failure("all_reduce", group, error) from error

        return call

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
        options = set_async(internals.ReduceOptions(), async_op)
        options.reduceOp = self._all_reduce[op].reduceOp
        options.rootRank = state.position(dst, group_dst)
        work = self._start("reduce", group, state.pg.reduce, [tensor], options)
        return self._finish("reduce", work, tensor, group, async_op)

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        state = self._state(group)
        options = set_async(internals.BroadcastOptions(), async_op)
        options.rootRank = state.position(src, group_src)
        options.rootTensor = 0
        work = self._start("broadcast", group, state.pg.broadcast, [tensor], options)
        return self._finish("broadcast", work, tensor, group, async_op)

    def all_gather(
        self,
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        state = self._state(group)
        options = set_async(internals.AllgatherOptions(), async_op)
        work = self._start("all_gather", group, state.pg.allgather, [tensor_list], [tensor], options)
        return self._finish("all_gather", work, tensor_list, group, async_op)

    def all_gather_into_tensor(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        method = getattr(self._state(group).pg, _ALL_GATHER)
        options = set_async(internals.AllgatherOptions(), async_op)
        work = self._start("all_gather_into_tensor", group, method, output_tensor, input_tensor, options)
        return self._finish("all_gather_into_tensor", work, output_tensor, group, async_op)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: object = "sum",
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        method = getattr(self._state(group).pg, _REDUCE_SCATTER)
        options = set_async(internals.ReduceScatterOptions(), async_op)
        options.reduceOp = self._all_reduce[op].reduceOp
        work = self._start("reduce_scatter_tensor", group, method, output, input, options)
        return self._finish("reduce_scatter_tensor", work, output, group, async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        method = getattr(self._state(group).pg, _ALL_TO_ALL)
        options = set_async(internals.AllToAllOptions(), async_op)
        splits = list(output_split_sizes or ()), list(input_split_sizes or ())
        work = self._start("all_to_all_single", group, method, output, input, *splits, options)
        return self._finish("all_to_all_single", work, output, group, async_op)

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
        options = set_async(internals.GatherOptions(), async_op)
        options.rootRank = state.position(dst, group_dst)
        outputs = [gather_list] if gather_list else []
        work = self._start("gather", group, state.pg.gather, outputs, [tensor], options)
        return self._finish("gather", work, gather_list, group, async_op)

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
        options = set_async(internals.ScatterOptions(), async_op)
        options.rootRank = state.position(src, group_src)
        inputs = [scatter_list] if scatter_list else []
        work = self._start("scatter", group, state.pg.scatter, [tensor], inputs, options)
        return self._finish("scatter", work, tensor, group, async_op)

    def barrier(
        self,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        device_ids: list[int] | None = None,
        timeout: timedelta | None = None,
    ) -> Work | None:
        state = self._state(group)
        options = set_async(internals.BarrierOptions(), async_op)
        if device_ids is not None:
            options.device_ids = device_ids
        if timeout is not None:
            options.timeout = timeout
        # torch picks the accelerator where the group serves one, as its own function does.
        device = next((device for device in state.libraries if device != "cpu"), "cpu")
        if hasattr(options, "device") and "cpu" not in state.libraries:
            options.device = torch.device(device)
        work = self._start("barrier", group, state.pg.barrier, options)
        return self._finish("barrier", work, None, group, async_op)
