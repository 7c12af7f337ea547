"""Fast paths by the process group's own methods: plain tensors in, one call of c10d, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as internals

from comm_backend_torch.capabilities import capabilities_of
from comm_backend_torch.reduce_ops import C10D_OPS, set_async
from comm_backend_torch.work import TorchWork
from comm_backend_torch.world import World
from comm_utils import operations
from comm_utils.backend import Capabilities
from comm_utils.fast_path import FastPath
from comm_utils.operations import Role
from comm_utils.reduce_op import ReduceOp, parse_reduce_op
from comm_utils.torch_support.fast_arguments import acceptance
from comm_utils.torch_support.flattening import flat_view, flatten, staging_memory
from comm_utils.torch_support.group_state import GroupState
from comm_utils.torch_support.plain_tensors import PlainTensors, first_to_accept, plain_tensors, present

__all__ = ["ALL_GATHER", "ALL_TO_ALL", "REDUCE_SCATTER", "fast_path"]

# torch 2.13 renamed the flat collectives of the process group; the old names go through the new ones.
_NEW_NAMES = hasattr(ProcessGroup, "all_gather_single")
ALL_GATHER = "all_gather_single" if _NEW_NAMES else "_allgather_base"
REDUCE_SCATTER = "reduce_scatter_single" if _NEW_NAMES else "_reduce_scatter_base"
ALL_TO_ALL = "all_to_all_single" if _NEW_NAMES else "alltoall_base"

# Libraries that exchange lists of tensors themselves; the others are given one tensor.
_EXCHANGE_LISTS = frozenset(("fake", "nccl", "xccl"))
# Reduces in place where made in inference mode; c10d, which copies for some calls, cannot write such tensors otherwise.
_IN_PLACE = "all_reduce"

_Start = Callable[..., Any]


class _Kind(NamedTuple):
    """The properties that all calls of one fast path share."""

    state: GroupState
    device: str
    op: ReduceOp | None
    root: int | None
    async_op: bool

    @property
    def capabilities(self) -> Capabilities:
        return capabilities_of(self.state.libraries[self.device])


def fast_path(
    backend: World, operation: str, detail: Any, group: ProcessGroup | None, async_op: bool
) -> FastPath | None:
    """Make the fast path; see ``comm_utils.backend.Backend.fast_path``."""
    if operation not in _STARTS or (async_op and operation in ("recv", "send")):
        return None
    state = backend._state(group)
    op, root = _settle(operation, detail, state)
    devices = present(state.devices)
    if operation == "barrier":  # torch picks the accelerator where the group serves nothing else
        devices = devices[:1] if "cpu" not in devices else ["cpu"]
    found = [
        path
        for device in devices
        if (path := _on_device(backend, operation, group, _Kind(state, device, op, root, async_op))) is not None
    ]
    return first_to_accept(found)


def _settle(operation: str, detail: Any, state: GroupState) -> tuple[ReduceOp | None, int | None]:
    """Return the op and the root's group rank that ``detail`` names."""
    root = op = None
    row = operations.get(operation)
    reduces, is_rooted = row.pattern.reduces, row.argument(Role.ROOT) is not None
    if reduces:
        op = parse_reduce_op(detail[1] if is_rooted else detail)
    if is_rooted:
        root = state.position(detail[0] if reduces else detail, None)
    return op, root


def _on_device(backend: World, operation: str, group: ProcessGroup | None, kind: _Kind) -> FastPath | None:
    state = kind.state
    capabilities = kind.capabilities
    dtypes = capabilities.dtypes
    if kind.op is not None:
        dtypes = frozenset(dtype for op, dtype in capabilities.reductions if op is kind.op)
        if not dtypes:
            return None  # c10d may not know the op at all
    inference = operation == _IN_PLACE
    accepts = acceptance(operation, kind.device, dtypes, len(state.ranks), state.rank, kind.root, inference=inference)
    start = _STARTS[operation](kind)
    if start is None or accepts is None:
        return None
    alive, pg, failure = internals._world.pg_map, state.pg, partial(backend._failure, operation, group)

    if kind.async_op:
        outcome_at = 1 if operation == "gather" else 0

        def begin(*tensors: Any) -> TorchWork | None:
            if not accepts(*tensors) or pg not in alive:
                return None
            try:
                work = start(*tensors)
            except RuntimeError as error:
                raise failure(error) from error
            return TorchWork(work, tensors[outcome_at] if tensors else None, failure)

        return begin
    if operation in _ON_ONE:
        return _on_one(start, plain_tensors(kind.device, dtypes, inference=inference), pg, failure)

    def call(*tensors: Any) -> bool:
        if not accepts(*tensors) or pg not in alive:
            return False
        try:
            work = start(*tensors)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise failure(error) from error
        return True

    return call


def _on_one(
    start: _Start, are_plain: PlainTensors, pg: ProcessGroup, failure: Callable[[Any], BaseException]
) -> FastPath:
    """Make the fast path of one tensor, which saves a call over the general one."""
    alive = internals._world.pg_map

    def call(tensor: Any) -> bool:
        one = [tensor]
        if not are_plain(one) or pg not in alive:
            return False
        try:
            work = start(one)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise failure(error) from error
        return True

    return call


# --- how each operation is started


def _options(kind: _Kind, of: type) -> Any:
    options = set_async(of(), kind.async_op)
    if kind.op is not None:
        options.reduceOp = C10D_OPS[kind.op]
    if kind.root is not None:
        options.rootRank = kind.root
    return options


def _of_list(kind: _Kind, method: Callable[..., Any], options: Any) -> _Start:
    """Return ``method`` of a list of one tensor."""
    if kind.async_op:
        return lambda tensor: method([tensor], options)
    return lambda tensors: method(tensors, options)


def _all_reduce(kind: _Kind) -> _Start:
    return _of_list(kind, kind.state.pg.allreduce, _options(kind, internals.AllreduceOptions))


def _broadcast(kind: _Kind) -> _Start:
    options = _options(kind, internals.BroadcastOptions)
    options.rootTensor = 0
    return _of_list(kind, kind.state.pg.broadcast, options)


def _reduce(kind: _Kind) -> _Start:
    options, method = _options(kind, internals.ReduceOptions), kind.state.pg.reduce
    if kind.state.rank == kind.root or kind.capabilities.preserving_reduce:
        return _of_list(kind, method, options)

    # The tensors of the other ranks stay as they are.
    def of_copy(tensors: Any) -> Any:
        tensor = tensors if kind.async_op else tensors[0]
        return method([tensor.detach().clone()], options)

    return of_copy


def _message(name: str) -> Callable[[_Kind], _Start]:
    def make(kind: _Kind) -> _Start:
        method, peer = getattr(kind.state.pg, name), kind.root
        return lambda tensors: method(tensors, peer, 0)

    return make


def _all_gather(kind: _Kind) -> _Start:
    method, options = kind.state.pg.allgather, _options(kind, internals.AllgatherOptions)
    return lambda parts, tensor: method([parts], [tensor], options)


def _all_gather_into_tensor(kind: _Kind) -> _Start:
    method, options = getattr(kind.state.pg, ALL_GATHER), _options(kind, internals.AllgatherOptions)

    def start(output: torch.Tensor, input: torch.Tensor) -> Any:
        if output.dim() != 1 or input.dim() != 1:
            output, input = flat_view(output), flat_view(input)
        return method(output, input, options)

    return start


def _reduce_scatter_tensor(kind: _Kind) -> _Start | None:
    if "reduce_scatter_tensor" not in kind.capabilities.operations:
        return None
    method, options = getattr(kind.state.pg, REDUCE_SCATTER), _options(kind, internals.ReduceScatterOptions)

    def start(output: torch.Tensor, input: torch.Tensor) -> Any:
        if output.dim() != 1 or input.dim() != 1:
            output, input = flat_view(output), flat_view(input)
        return method(output, input, options)

    return start


def _reduce_scatter(kind: _Kind) -> _Start | None:
    if kind.state.libraries[kind.device] not in _EXCHANGE_LISTS:
        return None
    method, options = kind.state.pg.reduce_scatter, _options(kind, internals.ReduceScatterOptions)
    return lambda output, inputs: method([output], [inputs], options)


def _all_to_all_single(kind: _Kind) -> _Start:
    method, options = getattr(kind.state.pg, ALL_TO_ALL), _options(kind, internals.AllToAllOptions)
    return lambda output, input, rows_out=None, rows_in=None: method(
        output, input, rows_out or [], rows_in or [], options
    )


def _all_to_all(kind: _Kind) -> _Start | None:
    options, exchange = _options(kind, internals.AllToAllOptions), getattr(kind.state.pg, ALL_TO_ALL)
    if kind.state.libraries[kind.device] in _EXCHANGE_LISTS:
        return partial(_exchange_lists, kind.state.pg.alltoall, options)
    if kind.async_op:
        return None

    def start(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        source = flatten(inputs)
        memory, finish = staging_memory(outputs, source)
        sizes_out, sizes_in = [one.numel() for one in outputs], [one.numel() for one in inputs]
        exchange(memory, source, sizes_out, sizes_in, options).wait()
        finish()

    return start


def _exchange_lists(
    method: Callable[..., Any], options: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
) -> Any:
    written = {one.untyped_storage().data_ptr() for one in outputs}
    if any(one.untyped_storage().data_ptr() in written for one in inputs):
        inputs = [one.clone() for one in inputs]  # read while others' elements arrive there
    return method(outputs, inputs, options)


def _gather(kind: _Kind) -> _Start:
    method, options = kind.state.pg.gather, _options(kind, internals.GatherOptions)
    return lambda tensor, parts: method([parts] if parts else [], [tensor], options)


def _scatter(kind: _Kind) -> _Start:
    method, options = kind.state.pg.scatter, _options(kind, internals.ScatterOptions)
    return lambda tensor, parts: method([tensor], [parts] if parts else [], options)


def _barrier(kind: _Kind) -> _Start:
    method, options = kind.state.pg.barrier, _options(kind, internals.BarrierOptions)
    if hasattr(options, "device") and kind.device != "cpu":
        options.device = torch.device(kind.device)
    return lambda: method(options)


_ON_ONE = frozenset(("all_reduce", "broadcast", "recv", "reduce", "send"))
_STARTS: dict[str, Callable[[_Kind], _Start | None]] = {
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "gather": _gather,
    "recv": _message("recv"),
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "scatter": _scatter,
    "send": _message("send"),
}
