"""Fast paths of both engines: plain tensors in, one call of native code, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from comm_backend_ccl import oneccl_library, shared_memory
from comm_backend_ccl.communicator import Communicator
from comm_backend_ccl.oneccl_communicator import OneCclCommunicator
from comm_backend_ccl.shared_communicator import SharedCommunicator
from comm_backend_ccl.tables import ONECCL_DTYPES, ONECCL_OPS, Operation
from comm_backend_ccl.work import LOOK_AROUND_S, CclWork
from comm_utils import operations
from comm_utils.fast_path import FastPath
from comm_utils.operations import Role
from comm_utils.reduce_op import ReduceOp, parse_reduce_op
from comm_utils.torch_support.fast_arguments import Accept, acceptance
from comm_utils.torch_support.flattening import flat_view, flattened, staging_memory

__all__ = ["fast_path"]

#: Starts an operation on the user's tensors: None where it is complete, else a handle.
_Start = Callable[..., "CclWork | None"]
_Run = Callable[[int, int, int], "oneccl_library.Handle | None"]


class _Kind(NamedTuple):
    """The properties that all calls of one fast path share.

    Attributes:
        operation: as ``Backend.fast_path`` names it.
        name: the call of the user's, for messages.
        root: the group rank of the root or the peer.
        watched: the operation has to end even if nobody waits for it.
    """

    operation: str
    name: str
    op: ReduceOp
    root: int
    watched: bool


def fast_path(
    ours: Communicator, operation: str, detail: Any, name: str, async_op: bool, forget: Callable[[], None]
) -> FastPath | None:
    """Make the fast path; see ``comm_utils.backend.Backend.fast_path``.

    Args:
        name: the call, for messages.
        forget: called after a failure.
    """
    if operation not in _ON_ANY or (async_op and operation in _MESSAGES):
        return None
    row = operations.get(operation)
    reduces, is_rooted = row.pattern.reduces, row.argument(Role.ROOT) is not None
    op = parse_reduce_op((detail[1] if is_rooted else detail) if reduces else "sum")
    root = ours.position(detail[0] if reduces else detail, None) if is_rooted else 0
    kind = _Kind(operation, name, op, root, async_op)
    capabilities = ours.capabilities
    dtypes = capabilities.dtypes
    if reduces:
        dtypes = frozenset(dtype for reduced, dtype in capabilities.reductions if reduced is op)
        if not dtypes:
            return None  # the library may not know the op at all
    # Native code writes tensors of the inference mode as any others; torch, which copies to lists, refuses to.
    inference = operation not in _TO_LISTS
    accepts = acceptance(operation, "cpu", dtypes, ours.size, ours.rank, root, inference=inference)
    assert accepts is not None
    if async_op:
        started = _started_natively(ours, kind) if isinstance(ours, SharedCommunicator) else None
        return started or _asynchronous(ours, kind, accepts)
    if isinstance(ours, SharedCommunicator) and operation not in _MESSAGES:
        found = _in_shared_memory(ours, kind, accepts, forget)
        if found is not None:
            return found
    if isinstance(ours, OneCclCommunicator) and operation in _PLANNED:
        return _waiting(ours, kind, accepts, _planned(ours, kind), forget)
    return _waiting(ours, kind, accepts, _ON_ANY[operation](ours, kind), forget)


def _asynchronous(ours: Communicator, kind: _Kind, accepts: Accept) -> FastPath:
    start, outcome_at = _ON_ANY[kind.operation](ours, kind), 1 if kind.operation == "gather" else 0

    def begin(*tensors: Any) -> CclWork | None:
        if not ours.usable or not accepts(*tensors):
            return None
        work = start(*tensors)
        assert work is not None
        work.name = kind.name
        work.outcome = tensors[outcome_at] if tensors else None
        return work

    return begin


def _waiting(
    ours: Communicator, kind: _Kind, accepts: Accept, start: _Start, forget: Callable[[], None]
) -> Callable[..., bool]:
    def call(*tensors: Any) -> bool:
        if not ours.usable or not accepts(*tensors):
            return False
        work = start(*tensors)
        if work is not None:
            work.name = kind.name
            try:
                work.wait()
            except BaseException:
                forget()
                raise
        return True

    return call


# --- in shared memory


def _started_natively(ours: SharedCommunicator, kind: _Kind) -> FastPath | None:
    operation, name = kind.operation, kind.name
    if operation not in _VALIDATED:
        return None  # there is something to do before or after
    native = _NATIVE[operation]
    begin = shared_memory.starter(ours.number, native, kind.op, kind.root if native in _ROOTED_NATIVE else -1)
    if begin is None:
        return None

    def start(*tensors: Any) -> CclWork | None:
        handle = begin(*tensors)
        if handle is False:
            return None
        return CclWork(ours, None if handle is True else handle, (), name, tensors[0] if tensors else None)

    return start


def _in_shared_memory(
    ours: SharedCommunicator, kind: _Kind, accepts: Accept, forget: Callable[[], None]
) -> FastPath | None:
    """Return the engine's own function of tensors, or one around it; None where torch is too old for it."""

    def wait(handle: int, *tensors: torch.Tensor) -> bool:
        try:
            return CclWork(ours, handle, tensors, kind.name).wait()
        except BaseException:
            forget()
            raise

    operation = kind.operation
    native = _NATIVE[operation]
    root = kind.root if native in _ROOTED_NATIVE else -1
    shortcut = shared_memory.shortcut(ours.number, native, kind.op, root, wait)
    if shortcut is None:
        return None
    if operation in _VALIDATED:
        return shortcut

    def of_tensors(*tensors: Any) -> bool:
        return accepts(*tensors) and shortcut(*tensors)

    def into_list(outputs: Any, input: Any) -> bool:
        memory, finish = staging_memory(outputs, input)
        if not shortcut(memory, input):
            return False
        finish()
        return True

    def exchange_lists(outputs: Any, inputs: Any) -> bool:
        if not accepts(outputs, inputs):
            return False
        source = flattened(inputs)
        memory, finish = staging_memory(outputs, source)
        sizes_out, sizes_in = [one.numel() for one in outputs], [one.numel() for one in inputs]
        if not shortcut(memory, source, sizes_out, sizes_in):
            return False
        finish()
        return True

    if ours.rank != kind.root:
        of_root: FastPath = lambda tensor, parts: accepts(tensor, parts) and shortcut(tensor)  # noqa: E731
    elif operation == "gather":
        of_root = lambda tensor, parts: accepts(tensor, parts) and into_list(parts, tensor)  # noqa: E731
    else:
        of_root = lambda tensor, parts: accepts(tensor, parts) and shortcut(tensor, flattened(parts, tensor))  # noqa: E731
    special: dict[str, FastPath] = {
        "all_gather": lambda outputs, input: accepts(outputs, input) and into_list(outputs, input),
        "all_to_all": exchange_lists,
        "gather": of_root,
        "reduce_scatter": lambda output, parts: accepts(output, parts) and shortcut(output, flattened(parts, output)),
        "scatter": of_root,
    }
    path: FastPath = special.get(operation, of_tensors)
    return path


# --- on any engine


def _all_gather(ours: Communicator, kind: _Kind) -> _Start:
    return lambda outputs, input: ours.all_gather_parts(outputs, input, kind.watched)


def _all_gather_into_tensor(ours: Communicator, kind: _Kind) -> _Start:
    return lambda output, input: ours.all_gather(output, input, kind.watched)


def _all_reduce(ours: Communicator, kind: _Kind) -> _Start:
    return lambda tensor: ours.all_reduce(tensor, kind.op, kind.watched)


def _all_to_all(ours: Communicator, kind: _Kind) -> _Start:
    def start(outputs: Any, inputs: Any) -> CclWork:
        source = flattened(inputs)
        memory, finish = staging_memory(outputs, source)
        sizes_out, sizes_in = [one.numel() for one in outputs], [one.numel() for one in inputs]
        return ours.all_to_all(memory, source, sizes_out, sizes_in, kind.watched).then(finish)

    return start


def _all_to_all_single(ours: Communicator, kind: _Kind) -> _Start:
    return lambda output, input, rows_out=None, rows_in=None: ours.all_to_all_rows(
        output, input, rows_out, rows_in, kind.watched
    )


def _barrier(ours: Communicator, kind: _Kind) -> _Start:
    return lambda: ours.barrier(kind.watched)


def _broadcast(ours: Communicator, kind: _Kind) -> _Start:
    return lambda tensor: ours.broadcast(tensor, kind.root, kind.watched)


def _gather(ours: Communicator, kind: _Kind) -> _Start:
    return lambda tensor, outputs: ours.gather_parts(outputs, tensor, kind.root, kind.watched)


def _receive(ours: Communicator, kind: _Kind) -> _Start:
    return lambda tensor: ours.receive(tensor, kind.root)


def _reduce(ours: Communicator, kind: _Kind) -> _Start:
    return lambda tensor: ours.reduce(tensor, kind.root, kind.op, kind.watched)


def _reduce_scatter(ours: Communicator, kind: _Kind) -> _Start:
    return lambda output, inputs: ours.reduce_scatter(output, flattened(inputs, output), kind.op, kind.watched)


def _reduce_scatter_tensor(ours: Communicator, kind: _Kind) -> _Start:
    return lambda output, input: ours.reduce_scatter(output, input, kind.op, kind.watched)


def _scatter(ours: Communicator, kind: _Kind) -> _Start:
    return lambda tensor, inputs: ours.scatter_parts(tensor, inputs, kind.root, kind.watched)


def _send(ours: Communicator, kind: _Kind) -> _Start:
    return lambda tensor: ours.send(tensor, kind.root)


_ON_ANY: dict[str, Callable[[Communicator, _Kind], _Start]] = {
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "gather": _gather,
    "recv": _receive,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "scatter": _scatter,
    "send": _send,
}
_NATIVE = {
    "all_gather": Operation.ALL_GATHER,
    "all_gather_into_tensor": Operation.ALL_GATHER,
    "all_reduce": Operation.ALL_REDUCE,
    "all_to_all": Operation.ALL_TO_ALL_V,
    "all_to_all_single": Operation.ALL_TO_ALL_V,
    "barrier": Operation.BARRIER,
    "broadcast": Operation.BROADCAST,
    "gather": Operation.GATHER,
    "recv": Operation.RECEIVE,
    "reduce": Operation.REDUCE,
    "reduce_scatter": Operation.REDUCE_SCATTER,
    "reduce_scatter_tensor": Operation.REDUCE_SCATTER,
    "scatter": Operation.SCATTER,
    "send": Operation.SEND,
}
_ROOTED_NATIVE = (Operation.BROADCAST, Operation.GATHER, Operation.REDUCE, Operation.SCATTER)
_MESSAGES = frozenset(("recv", "send"))
_TO_LISTS = frozenset(("all_gather", "all_to_all", "gather"))
#: Native code validates the tensors of these by itself.
_VALIDATED = frozenset(
    (
        "all_gather_into_tensor",
        "all_reduce",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "reduce",
        "reduce_scatter_tensor",
    )
)
#: oneCCL has no fast path for the others.
_PLANNED = frozenset(
    (
        "all_gather",
        "all_gather_into_tensor",
        "all_reduce",
        "all_to_all_single",
        "broadcast",
        "recv",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "send",
    )
)


# --- on oneCCL

# Sends of so much do not wait for their receive, and are announced while they travel.
_AT_ONCE_BYTES = 4096


class _ByDtype(dict[torch.dtype, _Run]):
    """``runs[dtype]`` reduces elements of it."""

    def __init__(self, group: oneccl_library.Group, operation: Operation, op: int) -> None:
        super().__init__()
        self._settled = group, operation, op

    def __missing__(self, dtype: torch.dtype) -> _Run:
        group, operation, op = self._settled
        run = self[dtype] = oneccl_library.plan(group, operation, ONECCL_DTYPES[dtype], op, 0, LOOK_AROUND_S)
        return run


def _planned(ours: OneCclCommunicator, kind: _Kind) -> _Start:
    """Return a function that starts the operation and waits briefly, in one native call."""
    native = _NATIVE[kind.operation]

    def later(handle: oneccl_library.Handle, *tensors: torch.Tensor) -> CclWork:
        work = CclWork(ours, handle, tensors, kind.name)
        if kind.operation in _MESSAGES:
            work.peer = kind.root
        return work

    if operations.get(kind.operation).pattern.reduces:
        runs = _ByDtype(ours.group, native, ONECCL_OPS[kind.op])

        def all_reduce(tensor: torch.Tensor) -> CclWork | None:
            address = tensor.data_ptr()
            handle = runs[tensor.dtype](address, address, tensor.numel())
            return None if handle is None else later(handle, tensor)

        def reduce_scatter(output: torch.Tensor, input: torch.Tensor) -> CclWork | None:
            handle = runs[output.dtype](input.data_ptr(), output.data_ptr(), output.numel())
            return None if handle is None else later(handle, output, input)

        if kind.operation == "all_reduce":
            return all_reduce
        if kind.operation == "reduce_scatter":
            return lambda output, inputs: reduce_scatter(output, flattened(inputs, output))
        return reduce_scatter

    run = oneccl_library.plan(ours.group, native, ONECCL_DTYPES[torch.uint8], 0, kind.root, LOOK_AROUND_S)

    def on_one(tensor: torch.Tensor) -> CclWork | None:
        address = tensor.data_ptr()
        handle = run(address, address, tensor.nbytes)
        return None if handle is None else later(handle, tensor)

    def gather(output: torch.Tensor, input: torch.Tensor) -> CclWork | None:
        handle = run(input.data_ptr(), output.data_ptr(), input.nbytes)
        return None if handle is None else later(handle, output, input)

    def gather_into_list(outputs: list[torch.Tensor], input: torch.Tensor) -> CclWork | None:
        memory, finish = staging_memory(outputs, input)
        work = gather(memory, flat_view(input))
        if work is not None:
            return work.then(finish)
        finish()
        return None

    def exchange(output: torch.Tensor, input: torch.Tensor, rows_out: Any = None, rows_in: Any = None) -> Any:
        if rows_out is not None:
            return ours.all_to_all_rows(output, input, rows_out, rows_in)
        handle = equal(input.data_ptr(), output.data_ptr(), input.nbytes // ours.size)
        return None if handle is None else later(handle, output, input)

    if kind.operation == "all_to_all_single":
        equal = oneccl_library.plan(ours.group, Operation.ALL_TO_ALL, ONECCL_DTYPES[torch.uint8], 0, 0, LOOK_AROUND_S)
        return exchange

    def send(tensor: torch.Tensor) -> CclWork | None:
        if tensor.nbytes > _AT_ONCE_BYTES:
            ours.untagged.announce(kind.root)
            return on_one(tensor)
        work = on_one(tensor)
        ours.untagged.announce(kind.root)
        return work

    def receive(tensor: torch.Tensor) -> CclWork | None:
        return on_one(tensor) if ours.untagged.take(kind.root) else ours.receive(tensor, kind.root)

    starts: dict[str, _Start] = {
        "all_gather": gather_into_list,
        "all_gather_into_tensor": gather,
        "recv": receive,
        "send": send,
    }
    return starts.get(kind.operation, on_one)
