"""Fast paths: plain tensors in, one call of c10d, nothing else.

The methods of a process group are operators of torch's dispatcher, each of which calls the same method of the library
behind the group. What the dispatcher adds to that is work for modes, transforms and subclasses of tensors, which no
plain tensor needs, and an event for the profiler. So a fast path calls the library itself, which saves about a
microsecond, unless a profiler watches this thread. Asynchronous calls go through the dispatcher, which makes their
handles known to compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as internals

from comm_backend_torch.capabilities import capabilities_of
from comm_backend_torch.gloo_waits import WaitInSlices, wait_in_slices
from comm_backend_torch.reduce_ops import C10D_OPS, set_async
from comm_backend_torch.work import TorchWork
from comm_backend_torch.world import World
from comm_utils import operations
from comm_utils.backend import Capabilities
from comm_utils.fast_path import FastPath
from comm_utils.flight_recorder.layout import IN_BACKGROUND
from comm_utils.flight_recorder.recorder import Kind
from comm_utils.operations import Role
from comm_utils.reduce_op import ReduceOp, parse_reduce_op
from comm_utils.torch_support.fast_arguments import acceptance
from comm_utils.torch_support.flattening import flat_view, flatten, staging_memory
from comm_utils.torch_support.group_state import GroupState
from comm_utils.torch_support.plain_tensors import PlainTensors, first_to_accept, plain_tensors, present
from comm_utils.torch_support.recorded_calls import KindsByDtype, Note, measure_of

__all__ = ["ALL_GATHER", "ALL_TO_ALL", "REDUCE_SCATTER", "fast_path"]

# torch 2.13 renamed the flat collectives of the process group, whose old names go through the new ones; its libraries
# kept the old ones.
_NEW_NAMES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
}
_OF_GROUPS = {old: new if hasattr(ProcessGroup, new) else old for old, new in _NEW_NAMES.items()}
ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = _OF_GROUPS.values()

# Libraries that exchange lists of tensors themselves; the others are given one tensor.
_EXCHANGE_LISTS = frozenset(("fake", "nccl", "xccl"))
# Reduces in place where made in inference mode; c10d, which copies for some calls, cannot write such tensors otherwise.
_IN_PLACE = "all_reduce"

_Start = Callable[..., Any]
# Whether a profiler watches this thread.
_is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled


class _Kind(NamedTuple):
    """The properties that all calls of one fast path share.

    Attributes:
        operation: as ``Backend.fast_path`` names it.
        call: the user's, for the flight recorder.
        methods: has c10d's methods: the process group, or its library for this kind of device.
    """

    operation: str
    call: str
    state: GroupState
    device: str
    op: ReduceOp | None
    root: int | None
    async_op: bool
    methods: Any

    @property
    def capabilities(self) -> Capabilities:
        return capabilities_of(self.state.libraries[self.device])


def fast_path(
    backend: World, operation: str, detail: Any, group: ProcessGroup | None, async_op: bool
) -> FastPath | None:
    """Make the fast path; see ``comm_utils.backend.Backend.fast_path``."""
    if operation not in _STARTS or (async_op and operation in _MESSAGES):
        return None
    state = backend._state(group)
    op, root = _settle(operation, detail, state)
    devices = present(state.devices)
    if operation == "barrier":  # torch picks the accelerator where the group serves nothing else
        devices = devices[:1] if "cpu" not in devices else ["cpu"]
    name = backend._call or operation
    found = [
        path
        for device in devices
        if (
            path := _on_device(
                backend, operation, group, _Kind(operation, name, state, device, op, root, async_op, state.pg)
            )
        )
        is not None
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
    dispatched = _STARTS[operation](kind)
    if dispatched is None or accepts is None:
        return None
    alive, pg, failure = internals._world.pg_map, state.pg, partial(backend._failure, operation, group)
    is_profiled = _is_profiled
    in_slices = None if operation in _MESSAGES else wait_in_slices(state, kind.device)
    kinds, measure = _kinds(kind), measure_of(operation, len(state.ranks))

    if kind.async_op:
        outcome_at = 1 if operation == "gather" else 0

        def begin(*tensors: Any) -> TorchWork | None:
            if not accepts(*tensors) or pg not in alive:
                return None
            dtype, elements, sent, received = measure(*tensors)
            recorded = kinds[dtype]
            note = Note(recorded, recorded.begin(elements, 2, sent, received, IN_BACKGROUND))
            try:
                work = dispatched(*tensors)
            except BaseException as error:
                failed = failure(error) if isinstance(error, RuntimeError) else error
                note.fail()
                raise failed from (None if failed is error else error)
            return TorchWork(work, tensors[outcome_at] if tensors else None, failure, None, note, in_slices)

        return begin
    direct = _direct(kind) or dispatched
    if operation in _ON_ONE:
        are_plain = plain_tensors(kind.device, dtypes, inference=inference)
        return _on_one(direct, dispatched, are_plain, pg, failure, kinds, in_slices)

    def call(*tensors: Any) -> bool:
        if not accepts(*tensors) or pg not in alive:
            return False
        dtype, elements, sent, received = measure(*tensors)
        recorded = kinds[dtype]
        number = recorded.begin(elements, 2, sent, received)
        try:
            work = (dispatched if is_profiled() else direct)(*tensors)
            if work is None:
                pass
            elif in_slices is None:
                work.wait()
            else:
                in_slices(work)
        except BaseException as error:
            # The other ranks may be asked for the cause, and look at this call as well.
            failed = failure(error) if isinstance(error, RuntimeError) else error
            recorded.fail(number)
            if failed is error:
                raise
            raise failed from error
        recorded.end(number)
        return True

    return call


def _direct(kind: _Kind) -> _Start | None:
    """Return how the operation is started without torch's dispatcher; None where that is not possible."""
    try:
        library = kind.state.pg._get_backend(torch.device(kind.device))
        return _STARTS[kind.operation](kind._replace(methods=library))
    except (AttributeError, RuntimeError):  # written in Python, in parts
        return None


def _on_one(
    direct: _Start,
    dispatched: _Start,
    are_plain: PlainTensors,
    pg: ProcessGroup,
    failure: Callable[[Any], BaseException],
    kinds: dict[torch.dtype | None, Kind],
    in_slices: WaitInSlices | None,
) -> FastPath:
    """Make the fast path of one tensor, which saves a call over the general one."""
    alive, is_profiled = internals._world.pg_map, _is_profiled

    def call(tensor: Any) -> bool:
        one = [tensor]
        if not are_plain(one) or pg not in alive:
            return False
        recorded = kinds[tensor.dtype]
        number = recorded.begin(tensor.numel(), 2)
        try:
            work = (dispatched if is_profiled() else direct)(one)
            if work is None:
                pass
            elif in_slices is None:
                work.wait()
            else:
                in_slices(work)
        except BaseException as error:
            # The other ranks may be asked for the cause, and look at this call as well.
            failed = failure(error) if isinstance(error, RuntimeError) else error
            recorded.fail(number)
            if failed is error:
                raise
            raise failed from error
        recorded.end(number)
        return True

    return call


def _kinds(kind: _Kind) -> dict[torch.dtype | None, Kind]:
    """Return the kinds of call in the flight recorder by dtype."""
    state, op = kind.state, "" if kind.op is None else kind.op.name.lower()
    root = -1 if kind.root is None else kind.root
    return KindsByDtype(state.recorded_as(), state.ranks, kind.operation, kind.call, op=op, root=root)


# --- how each operation is started


def _options(kind: _Kind, of: type) -> Any:
    options = set_async(of(), kind.async_op)
    if kind.op is not None:
        options.reduceOp = C10D_OPS[kind.op]
    if kind.root is not None:
        options.rootRank = kind.root
    return options


def _flat(kind: _Kind, name: str) -> Callable[..., Any]:
    """Return the flat collective that has that name where it was not renamed."""
    found: Callable[..., Any] | None = getattr(kind.methods, _NEW_NAMES[name], None)
    return getattr(kind.methods, name) if found is None else found


def _of_list(kind: _Kind, method: Callable[..., Any], options: Any) -> _Start:
    """Return ``method`` of a list of one tensor."""
    if kind.async_op:
        return lambda tensor: method([tensor], options)
    return lambda tensors: method(tensors, options)


def _all_reduce(kind: _Kind) -> _Start:
    return _of_list(kind, kind.methods.allreduce, _options(kind, internals.AllreduceOptions))


def _broadcast(kind: _Kind) -> _Start:
    options = _options(kind, internals.BroadcastOptions)
    options.rootTensor = 0
    return _of_list(kind, kind.methods.broadcast, options)


def _reduce(kind: _Kind) -> _Start:
    options, method = _options(kind, internals.ReduceOptions), kind.methods.reduce
    if kind.state.rank == kind.root or kind.capabilities.preserving_reduce:
        return _of_list(kind, method, options)

    # The tensors of the other ranks stay as they are.
    def of_copy(tensors: Any) -> Any:
        tensor = tensors if kind.async_op else tensors[0]
        return method([tensor.detach().clone()], options)

    return of_copy


def _message(name: str) -> Callable[[_Kind], _Start]:
    def make(kind: _Kind) -> _Start:
        method, peer = getattr(kind.methods, name), kind.root
        return lambda tensors: method(tensors, peer, 0)

    return make


def _all_gather(kind: _Kind) -> _Start:
    method, options = kind.methods.allgather, _options(kind, internals.AllgatherOptions)
    return lambda parts, tensor: method([parts], [tensor], options)


def _all_gather_into_tensor(kind: _Kind) -> _Start:
    method, options = _flat(kind, "_allgather_base"), _options(kind, internals.AllgatherOptions)

    def start(output: torch.Tensor, input: torch.Tensor) -> Any:
        if output.dim() != 1 or input.dim() != 1:
            output, input = flat_view(output), flat_view(input)
        return method(output, input, options)

    return start


def _reduce_scatter_tensor(kind: _Kind) -> _Start | None:
    if "reduce_scatter_tensor" not in kind.capabilities.operations:
        return None
    method, options = _flat(kind, "_reduce_scatter_base"), _options(kind, internals.ReduceScatterOptions)

    def start(output: torch.Tensor, input: torch.Tensor) -> Any:
        if output.dim() != 1 or input.dim() != 1:
            output, input = flat_view(output), flat_view(input)
        return method(output, input, options)

    return start


def _reduce_scatter(kind: _Kind) -> _Start | None:
    if kind.state.libraries[kind.device] not in _EXCHANGE_LISTS:
        return None
    method, options = kind.methods.reduce_scatter, _options(kind, internals.ReduceScatterOptions)
    return lambda output, inputs: method([output], [inputs], options)


def _all_to_all_single(kind: _Kind) -> _Start:
    method, options = _flat(kind, "alltoall_base"), _options(kind, internals.AllToAllOptions)
    return lambda output, input, rows_out=None, rows_in=None: method(
        output, input, rows_out or [], rows_in or [], options
    )


def _all_to_all(kind: _Kind) -> _Start | None:
    options, exchange = _options(kind, internals.AllToAllOptions), _flat(kind, "alltoall_base")
    if kind.state.libraries[kind.device] in _EXCHANGE_LISTS:
        return partial(_exchange_lists, kind.methods.alltoall, options)
    if kind.async_op:
        return None
    in_slices = wait_in_slices(kind.state, kind.device)

    def start(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        source = flatten(inputs)
        memory, finish = staging_memory(outputs, source)
        sizes_out, sizes_in = [one.numel() for one in outputs], [one.numel() for one in inputs]
        work = exchange(memory, source, sizes_out, sizes_in, options)
        if in_slices is None:
            work.wait()
        else:
            in_slices(work)
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
    method, options = kind.methods.gather, _options(kind, internals.GatherOptions)
    return lambda tensor, parts: method([parts] if parts else [], [tensor], options)


def _scatter(kind: _Kind) -> _Start:
    method, options = kind.methods.scatter, _options(kind, internals.ScatterOptions)
    return lambda tensor, parts: method([tensor], [parts] if parts else [], options)


def _barrier(kind: _Kind) -> _Start:
    method, options = kind.methods.barrier, _options(kind, internals.BarrierOptions)
    if hasattr(options, "device") and kind.device != "cpu":
        options.device = torch.device(kind.device)
    return lambda: method(options)


_MESSAGES = frozenset(("recv", "send"))
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
