"""Collectives by the process group's own methods.

``torch.distributed``'s functions repeat, in Python and at every call, checks that have been made already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import GroupMember, ProcessGroup
from torch.distributed import distributed_c10d as internals

from comm_backend_torch.reduce_ops import OptionsTable
from comm_backend_torch.world import World
from comm_utils.backend import Work
from comm_utils.errors import NotInitializedError

__all__ = ["Collectives"]

# torch 2.13 renamed the flat collectives of the process group; the old names go through the new ones.
_NEW_NAMES = hasattr(ProcessGroup, "all_gather_single")
_ALL_GATHER = "all_gather_single" if _NEW_NAMES else "_allgather_base"
_REDUCE_SCATTER = "reduce_scatter_single" if _NEW_NAMES else "_reduce_scatter_base"
_ALL_TO_ALL = "all_to_all_single" if _NEW_NAMES else "alltoall_base"


# The group's methods for these take a list of tensors.
_ON_LISTS = ("all_reduce", "broadcast", "recv", "reduce", "send")


class Collectives(World):
    """See ``comm_utils.backend.Backend`` for what every method does."""

    def __init__(self, timeout: timedelta | None = None) -> None:
        super().__init__(timeout)
        self._all_reduce = OptionsTable(internals.AllreduceOptions, async_op=False)
        self._all_reduce_async = OptionsTable(internals.AllreduceOptions, async_op=True)

    def all_reduce(
        self, tensor: torch.Tensor, op: object = "sum", group: ProcessGroup | None = None, async_op: bool = False
    ) -> Work | None:
        pg: Any = GroupMember.WORLD if group is None else group
        options = (self._all_reduce_async if async_op else self._all_reduce)[op]
        if self._end is not None:
            reduction, options = options.reduceOp, self._options(internals.AllreduceOptions, async_op)
            options.reduceOp = reduction
        work = self._start("all_reduce", group, pg.allreduce, [tensor], options)
        return self._finish("all_reduce", work, tensor, group, async_op)

    def shortest_all_reduce(
        self, group: ProcessGroup | None = None, op: object = "sum"
    ) -> Callable[[Any], bool] | None:
        return None

    def prepare(
        self, operation: str, group: ProcessGroup | None = None, op: object = None, position: int | None = None
    ) -> Callable[..., None]:
        if self._end is not None:  # which is of one call, and what is prepared is for many
            return self.during(self._call).prepare(operation, group, op, position)
        pg = self._state(group).pg
        this = self if self._call else self.during(operation)
        method, settled, again = this._settled(operation, pg, op, position)

        alive = internals._world.pg_map

        def on_list(tensor: torch.Tensor) -> None:
            if pg not in alive:
                this._check_replaced(group)
                again(tensor)
                return
            try:
                work = method([tensor], settled)
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                raise this._failure(operation, group, error) from error

        def on_tensors(*tensors: torch.Tensor) -> None:
            if pg not in alive:
                this._check_replaced(group)
                again(*tensors)
                return
            try:
                work = method(*tensors, settled)
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                raise this._failure(operation, group, error) from error

        return on_list if operation in _ON_LISTS else on_tensors

    def prepare_apart(
        self, operation: str, group: ProcessGroup | None = None, op: object = None, position: int | None = None
    ) -> tuple[Callable[..., Any], Callable[[Any], None]] | None:
        if self._end is not None:
            return self.during(self._call).prepare_apart(operation, group, op, position)
        pg = self._state(group).pg
        this = self if self._call else self.during(operation)
        method, settled, again = this._settled(operation, pg, op, position)
        alive, of_list = internals._world.pg_map, operation in _ON_LISTS

        # prepare() is not made of these two, as each call between functions is felt in its time.
        def start(*tensors: Any) -> Any:
            if pg not in alive:
                this._check_replaced(group)
                again(*tensors)
                return None
            try:
                return method([*tensors], settled) if of_list else method(*tensors, settled)
            except RuntimeError as error:
                raise this._failure(operation, group, error) from error

        def finish(work: Any) -> None:
            if work is not None:
                try:
                    work.wait()
                except RuntimeError as error:
                    raise this._failure(operation, group, error) from error

        return start, finish

    def _check_replaced(self, group: ProcessGroup | None) -> None:
        """Forget a group that was destroyed through torch.distributed, perhaps with its world."""
        self.prepared.clear()
        try:
            self.check_group(group)
        except NotInitializedError as error:
            raise NotInitializedError(f"{self._call}: {error}") from None

    def _settled(
        self, operation: str, pg: Any, op: object, position: int | None
    ) -> tuple[Callable[..., Any], Any, Callable[..., object]]:
        """Return the group's method and its options; and the way to go if the group was replaced."""
        if operation == "all_reduce":
            return pg.allreduce, self._all_reduce[op], lambda tensor: self.all_reduce(tensor, op)
        if operation == "broadcast":
            options = self._options(internals.BroadcastOptions, False)
            options.rootRank, options.rootTensor = position, 0
            return pg.broadcast, options, lambda tensor: self.broadcast(tensor, None, None, False, position)
        if operation == "reduce":
            options = self._options(internals.ReduceOptions, False)
            options.reduceOp, options.rootRank = self._all_reduce[op].reduceOp, position
            return pg.reduce, options, lambda tensor: self.reduce(tensor, None, op, None, False, position)
        if operation == "gather":
            options = self._options(internals.GatherOptions, False)
            options.rootRank = position
            return (
                lambda tensor, parts, options: pg.gather([parts] if parts else [], [tensor], options),
                options,
                lambda tensor, parts: self.gather(tensor, parts, None, None, False, position),
            )
        if operation == "scatter":
            options = self._options(internals.ScatterOptions, False)
            options.rootRank = position
            return (
                lambda tensor, parts, options: pg.scatter([tensor], [parts] if parts else [], options),
                options,
                lambda tensor, parts: self.scatter(tensor, parts, None, None, False, position),
            )
        if operation == "all_gather_into_tensor":
            options = self._options(internals.AllgatherOptions, False)
            return getattr(pg, _ALL_GATHER), options, self.all_gather_into_tensor
        if operation == "reduce_scatter_tensor":
            options = self._options(internals.ReduceScatterOptions, False)
            options.reduceOp = self._all_reduce[op].reduceOp
            again = partial(self.reduce_scatter_tensor, op=op)
            return getattr(pg, _REDUCE_SCATTER), options, again
        if operation == "all_to_all_single":
            exchange, options = getattr(pg, _ALL_TO_ALL), self._options(internals.AllToAllOptions, False)
            return (
                lambda output, input, options: exchange(output, input, [], [], options),
                options,
                self.all_to_all_single,
            )
        if operation == "all_to_all_v":
            exchange, options = getattr(pg, _ALL_TO_ALL), self._options(internals.AllToAllOptions, False)
            return exchange, options, self.all_to_all_single
        if operation == "all_gather":
            options = self._options(internals.AllgatherOptions, False)
            return lambda parts, tensor, options: pg.allgather([parts], [tensor], options), options, self.all_gather
        if operation == "barrier":
            return pg.barrier, self._barrier_options(pg, False), self.barrier
        if operation in ("recv", "send"):
            method, general = getattr(pg, operation), getattr(self, operation)
            return (
                lambda tensors, position: method(tensors, position, 0),
                position,
                lambda tensor: general(tensor, None, None, 0, position),
            )
        raise ValueError(f"there is no fast path for {operation}")

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
        options = self._options(internals.BroadcastOptions, async_op)
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
        options = self._options(internals.AllgatherOptions, async_op)
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
        options = self._options(internals.AllgatherOptions, async_op)
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
        options = self._options(internals.ReduceScatterOptions, async_op)
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
        options = self._options(internals.AllToAllOptions, async_op)
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
        options = self._options(internals.GatherOptions, async_op)
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
        options = self._options(internals.ScatterOptions, async_op)
        options.rootRank = state.position(src, group_src)
        inputs = [scatter_list] if scatter_list else []
        work = self._start("scatter", group, state.pg.scatter, [tensor], inputs, options)
        return self._finish("scatter", work, tensor, group, async_op)

    def barrier(
        self, group: ProcessGroup | None = None, async_op: bool = False, device_ids: list[int] | None = None
    ) -> Work | None:
        state = self._state(group)
        options = self._barrier_options(state.pg, async_op)
        if device_ids is not None:
            options.device_ids = device_ids
        work = self._start("barrier", group, state.pg.barrier, options)
        return self._finish("barrier", work, None, group, async_op)

    def _barrier_options(self, pg: ProcessGroup, async_op: bool) -> Any:
        options = self._options(internals.BarrierOptions, async_op)
        # torch picks the accelerator where the group serves one, as its own function does.
        libraries = self._state(pg).libraries
        device = next((device for device in libraries if device != "cpu"), "cpu")
        if hasattr(options, "device") and "cpu" not in libraries:
            options.device = torch.device(device)
        return options
