"""Start each operation: one method of c10d, called with the tensors alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d as internals

from comm_backend_torch.capabilities import capabilities_of
from comm_backend_torch.waits import how_to_wait
from comm_utils.backend import Capabilities
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support.c10d_ops import C10D_OPS
from comm_utils.torch_support.fast_arguments import overwrites
from comm_utils.torch_support.flattening import flat_view, flatten, staging_memory
from comm_utils.torch_support.group_state import GroupState
from comm_utils.torch_support.plain_tensors import present

__all__ = ["ON_ONE", "STARTS", "CallKind", "Start", "device_of_barrier", "result_of"]

#: Operations on one tensor. Their starts take a list of it, or where the call is asynchronous the tensor itself.
ON_ONE = frozenset(("all_reduce", "broadcast", "recv", "reduce", "send"))

# torch 2.13 renamed the flat collectives of the process group, whose old names go through the new ones; its libraries
# kept the old ones.
_NEW_NAMES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
}

# Libraries that exchange lists of tensors themselves; the others are given one tensor.
_EXCHANGE_LISTS = frozenset(("fake", "nccl", "xccl"))

Start = Callable[..., Any]


class CallKind(NamedTuple):
    """The properties that all calls of one fast path share; or those of one call that was checked in full.

    Attributes:
        operation: as ``Backend.fast_path`` names it.
        call: the user's, for the flight recorder.
        methods: has c10d's methods: the process group, or its library for this kind of device.
        timeout: of the call; None is that of the group.
        device_ids: of a barrier.
    """

    operation: str
    call: str
    state: GroupState
    device: str
    op: ReduceOp | None
    root: int | None
    async_op: bool
    methods: Any
    timeout: timedelta | None = None
    device_ids: Sequence[int] | None = None

    @property
    def capabilities(self) -> Capabilities:
        return capabilities_of(self.state.libraries[self.device], self.device)

    @property
    def recorded(self) -> dict[str, Any]:
        """Return the op and the root as the flight recorder takes them."""
        op, root = self.op, self.root
        return {"op": "" if op is None else op.name.lower(), "root": -1 if root is None else root}


def result_of(operation: str, tensors: Sequence[Any]) -> Any:
    """Return which of the tensor arguments of a call hold its result; None of a barrier."""
    return tensors[1 if operation == "gather" else 0] if tensors else None


def device_of_barrier(state: GroupState, device_ids: Sequence[int] | None = None) -> str:
    """Return the type of device whose library does a barrier: the CPU where the group serves it and no index is given.

    torch decides alike. Left to itself, a process group would take the accelerator beside the CPU.
    """
    if "cpu" not in state.devices:
        return state.devices[0]
    if device_ids is None:
        return "cpu"
    return next((device for device in present(state.devices) if device != "cpu"), "cpu")


def _options(kind: CallKind, of: type) -> Any:
    options = of()
    if hasattr(options, "asyncOp"):  # whether a device's library leaves the current stream; since torch 2.7
        options.asyncOp = kind.async_op
    if kind.op is not None:
        options.reduceOp = C10D_OPS[kind.op]
    if kind.root is not None:
        options.rootRank = kind.root
    if kind.timeout is not None:
        options.timeout = kind.timeout
    return options


def _flat(kind: CallKind, name: str) -> Callable[..., Any]:
    """Return the flat collective that has that name where it was not renamed."""
    found: Callable[..., Any] | None = getattr(kind.methods, _NEW_NAMES[name], None)
    return getattr(kind.methods, name) if found is None else found


def _of_one(name: str, options_type: type) -> Callable[[CallKind], Start]:
    """Return what makes starts that call the method ``name`` with a list of one tensor."""

    def make(kind: CallKind) -> Start:
        method, options = getattr(kind.methods, name), _options(kind, options_type)
        if kind.async_op:
            return lambda tensor: method([tensor], options)
        return lambda tensors: method(tensors, options)

    return make


def _of_flat(name: str, options_type: type) -> Callable[[CallKind], Start]:
    """Return what makes starts that call the flat collective ``name`` with one-dimensional views."""

    def make(kind: CallKind) -> Start:
        method, options = _flat(kind, name), _options(kind, options_type)

        def start(output: torch.Tensor, input: torch.Tensor) -> Any:
            if output.dim() != 1 or input.dim() != 1:
                output, input = flat_view(output), flat_view(input)
            return method(output, input, options)

        return start

    return make


def _message(name: str) -> Callable[[CallKind], Start | None]:
    def make(kind: CallKind) -> Start | None:
        if kind.capabilities.messages_from_host:
            return None
        method, peer = getattr(kind.methods, name), kind.root
        return lambda tensors: method(tensors, peer, 0)

    return make


def _all_gather(kind: CallKind) -> Start:
    method, options = kind.methods.allgather, _options(kind, internals.AllgatherOptions)
    return lambda parts, tensor: method([parts], [tensor], options)


def _reduce_scatter(kind: CallKind) -> Start | None:
    if kind.state.libraries[kind.device] not in _EXCHANGE_LISTS:
        return None
    method, options = kind.methods.reduce_scatter, _options(kind, internals.ReduceScatterOptions)
    return lambda output, inputs: method([output], [inputs], options)


def _all_to_all_single(kind: CallKind) -> Start:
    method, options = _flat(kind, "alltoall_base"), _options(kind, internals.AllToAllOptions)
    return lambda output, input, rows_out=None, rows_in=None: method(
        output, input, rows_out or [], rows_in or [], options
    )


def _all_to_all(kind: CallKind) -> Start | None:
    options, exchange = _options(kind, internals.AllToAllOptions), _flat(kind, "alltoall_base")
    if kind.state.libraries[kind.device] in _EXCHANGE_LISTS:
        return partial(_exchange_lists, kind.methods.alltoall, options)
    if kind.async_op:
        return None
    own_wait = how_to_wait(kind.state, kind.device)

    def start(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        source = flatten(inputs)
        memory, finish = staging_memory(outputs, source)
        sizes_out, sizes_in = [one.numel() for one in outputs], [one.numel() for one in inputs]
        work = exchange(memory, source, sizes_out, sizes_in, options)
        if own_wait is None:
            work.wait()
        else:
            own_wait(work)
        finish()

    return start


def _exchange_lists(
    method: Callable[..., Any], options: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
) -> Any:
    if overwrites(outputs, inputs):  # while they are sent
        inputs = [one.clone() for one in inputs]
    return method(outputs, inputs, options)


def _gather(kind: CallKind) -> Start:
    method, options = kind.methods.gather, _options(kind, internals.GatherOptions)
    return lambda tensor, parts: method([parts] if parts else [], [tensor], options)


def _scatter(kind: CallKind) -> Start:
    method, options = kind.methods.scatter, _options(kind, internals.ScatterOptions)
    return lambda tensor, parts: method([tensor], [parts] if parts else [], options)


def _barrier(kind: CallKind) -> Start:
    method, options = kind.methods.barrier, _options(kind, internals.BarrierOptions)
    options.device = torch.device(kind.device)
    if kind.device_ids:
        options.device_ids = list(kind.device_ids)
        if kind.device != "cpu":
            options.device = torch.device(kind.device, kind.device_ids[0])
    return lambda: method(options)


STARTS: dict[str, Callable[[CallKind], Start | None]] = {
    "all_gather": _all_gather,
    "all_gather_into_tensor": _of_flat("_allgather_base", internals.AllgatherOptions),
    "all_reduce": _of_one("allreduce", internals.AllreduceOptions),
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
    "broadcast": _of_one("broadcast", internals.BroadcastOptions),
    "gather": _gather,
    "recv": _message("recv"),
    "reduce": _of_one("reduce", internals.ReduceOptions),
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _of_flat("_reduce_scatter_base", internals.ReduceScatterOptions),
    "scatter": _scatter,
    "send": _message("send"),
}
