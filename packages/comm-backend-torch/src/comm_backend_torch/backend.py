"""``torch.distributed``'s process groups behind the contract of ``comm_utils.backend``.

Calls go to the group's own methods: ``torch.distributed``'s functions repeat, in Python and at every call, checks that
the collectives have made already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup, Store
from torch.distributed import distributed_c10d as internals

from comm_backend_torch import groups
from comm_backend_torch.failures import classify
from comm_backend_torch.groups import GroupState
from comm_backend_torch.reduce_ops import OptionsTable, set_async
from comm_backend_torch.work import PolledWork, TorchWork
from comm_utils.backend import Capabilities, Work
from comm_utils.errors import NotInitializedError

__all__ = ["TorchBackend"]

# torch 2.13 renamed the flat collectives of the process group; the old names go through the new ones.
_NEW_NAMES = hasattr(ProcessGroup, "all_gather_single")
_ALL_GATHER = "all_gather_single" if _NEW_NAMES else "_allgather_base"
_REDUCE_SCATTER = "reduce_scatter_single" if _NEW_NAMES else "_reduce_scatter_base"
_ALL_TO_ALL = "all_to_all_single" if _NEW_NAMES else "alltoall_base"


class TorchBackend:
    """Serves every process group of this process, whoever created it.

    Args:
        timeout: given at initialisation; groups made later inherit it.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._groups: dict[ProcessGroup, GroupState] = {}
        self._all_reduce = OptionsTable(internals.AllreduceOptions, async_op=False)
        self._all_reduce_async = OptionsTable(internals.AllreduceOptions, async_op=True)
        self.prepared: dict[Any, Callable[[torch.Tensor], None]] = {}

    # --- who is where

    def is_initialized(self) -> bool:
        return c10d.is_initialized()

    def _state(self, group: ProcessGroup | None) -> GroupState:
        pg = internals._world.default_pg if group is None else group
        state = self._groups.get(pg)  # type: ignore[arg-type]
        if state is None:
            state = self._remember(pg)
        return state

    def _remember(self, pg: ProcessGroup | None) -> GroupState:
        if pg is None or pg not in internals._world.pg_map:
            raise NotInitializedError(
                "this process group no longer exists"
                if pg is not None
                else "torch.distributed's world group no longer exists; call comm_orchestrator.init_distributed() again"
            )
        self._forget_ended()
        self._groups[pg] = state = GroupState(pg)
        return state

    def _forget_ended(self) -> None:
        # Groups can also be destroyed through torch.distributed; holding on to them would keep their sockets open.
        alive = internals._world.pg_map
        for pg in [pg for pg in self._groups if pg not in alive]:
            del self._groups[pg]
        self.prepared.clear()

    def get_backend(self, group: ProcessGroup | None = None) -> str:
        libraries = self._state(group).libraries
        names = set(libraries.values())
        return names.pop() if len(names) == 1 else ",".join(f"{device}:{name}" for device, name in libraries.items())

    def get_rank(self, group: ProcessGroup | None = None) -> int:
        return self._state(group).rank

    def get_world_size(self, group: ProcessGroup | None = None) -> int:
        return len(self._state(group).ranks)

    def get_process_group_ranks(self, group: ProcessGroup | None = None) -> list[int]:
        return list(self._state(group).ranks)

    def get_world_group(self) -> ProcessGroup:
        return self._state(None).pg

    def get_store(self, group: ProcessGroup | None = None) -> Store:
        store: Store = internals._world.pg_map[self._state(group).pg][1]
        return store

    def get_timeout(self) -> timedelta | None:
        return self._timeout

    def device_types(self, group: ProcessGroup | None = None) -> tuple[str, ...]:
        return tuple(self._state(group).libraries)

    def capabilities(self, group: ProcessGroup | None = None, device_type: str = "cpu") -> Capabilities:
        return self._state(group).capabilities[device_type]

    def check_group(self, group: ProcessGroup | None = None) -> None:
        self._state(group).check()

    # --- groups

    def create_group(
        self,
        ranks: Sequence[int],
        name: str,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        device_id: torch.device | None = None,
    ) -> ProcessGroup:
        return groups.create(ranks, name, timeout or self._timeout, backend, pg_options, group_desc, device_id)

    def destroy_process_group(self, group: ProcessGroup | None = None) -> None:
        self._groups.pop(self._state(group).pg)
        if group is None:
            self._groups.clear()
        self.prepared.clear()
        c10d.destroy_process_group(group)

    # --- failures

    def _failure(self, operation: str, group: ProcessGroup | None, error: BaseException) -> BaseException:
        """``error`` as one of ours, after marking the group as broken; an unrelated one comes back as it is."""
        kind = classify(error)
        if kind is None:
            return error
        state = self._state(group)
        state.broken = f"{operation}: {error}"
        self.prepared.clear()
        rank = state.ranks[state.rank]
        return kind(f"{operation} on {state} failed on rank {rank}: {error}; the group cannot be used any more")

    def _finish(
        self, operation: str, work: Any, result: Any, group: ProcessGroup | None, async_op: bool
    ) -> Work | None:
        if async_op:
            return TorchWork(work, result, partial(self._failure, operation, group))
        if work is not None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failure(operation, group, error) from error
        return None

    def _start(self, operation: str, group: ProcessGroup | None, method: Any, *args: Any) -> Any:
        try:
            return method(*args)
        except RuntimeError as error:
            raise self._failure(operation, group, error) from error

    # --- collectives

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
        allreduce, options = pg.allreduce, self._all_reduce[op]

        def call(tensor: torch.Tensor) -> None:
            if (
                group is None and world.default_pg is not pg
            ):  # destroyed, and perhaps made anew, through torch.distributed
                self.prepared.clear()
                self._state(None)
                self.all_reduce(tensor, op)
                return
            try:
                work = allreduce([tensor], options)
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                raise self._failure("all_reduce", group, error) from error

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
        options.rootRank = _position(state, dst, group_dst)
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
        options.rootRank = _position(state, src, group_src)
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
        options.rootRank = _position(state, dst, group_dst)
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
        options.rootRank = _position(state, src, group_src)
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

    # --- point to point

    def send(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> None:
        self.isend(tensor, dst, group, tag, group_dst).wait()

    def recv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> int:
        work = self.irecv(tensor, src, group, tag, group_src)
        work.wait()
        state = self._state(group)
        if src is None and group_src is None:
            group_src = work._source_rank()  # type: ignore[attr-defined]
        return state.ranks[group_src] if src is None else src  # type: ignore[index]

    def isend(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Work:
        state = self._state(group)
        work = self._start("send", group, state.pg.send, [tensor], _position(state, dst, group_dst), tag)
        return self._point_to_point("send", work, tensor, state, group)

    def irecv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Work:
        state = self._state(group)
        if src is None and group_src is None:
            work = self._start("recv", group, state.pg.recv_anysource, [tensor], tag)
        else:
            work = self._start("recv", group, state.pg.recv, [tensor], _position(state, src, group_src), tag)
        return self._point_to_point("recv", work, tensor, state, group)

    def _point_to_point(
        self, operation: str, work: Any, tensor: torch.Tensor, state: GroupState, group: ProcessGroup | None
    ) -> Work:
        kind = PolledWork if state.libraries.get(tensor.device.type) == "gloo" else TorchWork
        return kind(work, tensor, partial(self._failure, operation, group))

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[Work]:
        first = p2p_op_list[0]
        if first.tensor.device.type == "cpu":
            return [self._one_of_a_batch(p2p) for p2p in p2p_op_list]
        # Only torch's own function opens the coalescing that device libraries need against deadlocks.
        works = c10d.batch_isend_irecv(p2p_op_list)
        result = [p2p.tensor for p2p in p2p_op_list]
        return [TorchWork(work, result, partial(self._failure, "batch_isend_irecv", first.group)) for work in works]

    def _one_of_a_batch(self, p2p: Any) -> Work:
        if p2p.op is c10d.isend:
            return self.isend(p2p.tensor, p2p.peer, p2p.group, p2p.tag)
        return self.irecv(p2p.tensor, p2p.peer, p2p.group, p2p.tag)


def _position(state: GroupState, global_rank: int | None, group_rank: int | None) -> int:
    if group_rank is not None:
        return group_rank
    return state.by_global[0 if global_rank is None else global_rank]
