"""Fast paths from tensors to an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from comm_backend_ccl import oneccl_library, shared_memory
from comm_backend_ccl.communicator import Communicator
from comm_backend_ccl.oneccl_communicator import OneCclCommunicator
from comm_backend_ccl.shared_communicator import SharedCommunicator
from comm_backend_ccl.tables import ONECCL_DTYPES, ONECCL_OPS, Operation
from comm_backend_ccl.work import LOOK_AROUND_S, CclWork
from comm_utils.reduce_op import parse_reduce_op
from comm_utils.torch_support.flattening import landing, together

__all__ = ["short_way", "shortest_way"]

_Run = Callable[[int, int, int], oneccl_library.Pending]
_Start = Callable[..., "CclWork | None"]

_OF_BYTES = {
    "all_gather": Operation.ALL_GATHER,
    "all_gather_into_tensor": Operation.ALL_GATHER,
    "all_to_all_single": Operation.ALL_TO_ALL,
    "broadcast": Operation.BROADCAST,
    "recv": Operation.RECEIVE,
    "send": Operation.SEND,
}
_AT_ONCE = {
    "all_gather": Operation.ALL_GATHER,
    "all_gather_into_tensor": Operation.ALL_GATHER,
    "all_to_all_single": Operation.ALL_TO_ALL_V,
    "all_to_all_v": Operation.ALL_TO_ALL_V,
    "barrier": Operation.BARRIER,
    "broadcast": Operation.BROADCAST,
    "gather": Operation.GATHER,
    "reduce": Operation.REDUCE,
    "reduce_scatter_tensor": Operation.REDUCE_SCATTER,
    "scatter": Operation.SCATTER,
}
_ROOTED = (Operation.BROADCAST, Operation.GATHER, Operation.REDUCE, Operation.SCATTER)
# oneCCL has no fast path for these.
_THE_USUAL_WAY = ("all_to_all_v", "gather", "reduce", "scatter")
_OF_ELEMENTS = {"all_reduce": Operation.ALL_REDUCE, "reduce_scatter_tensor": Operation.REDUCE_SCATTER}


def short_way(ours: Communicator, operation: str, op: object, position: int | None) -> _Start:
    """Return a function of tensors, as ``Backend.prepare`` describes them, that does ``operation``.

    It returns None where that is done, else a handle to wait for.
    """
    if operation == "barrier" and not isinstance(ours, SharedCommunicator):
        return lambda: ours.barrier()
    if isinstance(ours, OneCclCommunicator) and operation not in _THE_USUAL_WAY:
        return _on_oneccl(ours, operation, op, position)
    way = _on_any(ours, operation, op, position)
    return _at_once(ours, operation, op, position, way) if isinstance(ours, SharedCommunicator) else way


def shortest_way(ours: Communicator, op: object, name: str, forget: Callable[[], None]) -> Callable[[Any], bool] | None:
    """See ``Backend.shortest_all_reduce``.

    Args:
        name: the call, for messages.
        forget: called after a failure.
    """
    if not isinstance(ours, SharedCommunicator):
        return None

    def later(handle: int, tensor: torch.Tensor) -> bool:
        try:
            return CclWork(ours, handle, (tensor,), name).wait()
        except BaseException:
            forget()
            raise

    return shared_memory.shortcut(ours.number, Operation.ALL_REDUCE, parse_reduce_op(op), -1, later)


def _on_any(ours: Communicator, operation: str, op: object, position: int | None) -> _Start:
    reduce_op = parse_reduce_op("sum" if op is None else op)

    root = position or 0
    ways: dict[str, _Start] = {
        "all_gather": ours.all_gather_parts,
        "all_gather_into_tensor": ours.all_gather,
        "all_reduce": lambda tensor: ours.all_reduce(tensor, reduce_op),
        "all_to_all_single": ours.all_to_all,
        "all_to_all_v": ours.all_to_all_rows,
        "barrier": ours.barrier,
        "broadcast": lambda tensor: ours.broadcast(tensor, root),
        "gather": lambda tensor, outputs: ours.gather_parts(outputs, tensor, root),
        "recv": lambda tensor: ours.receive(tensor, root),
        "reduce": lambda tensor: ours.reduce(tensor, root, reduce_op),
        "reduce_scatter_tensor": lambda output, input: ours.reduce_scatter(output, input, reduce_op),
        "scatter": lambda tensor, inputs: ours.scatter_parts(tensor, inputs, root),
        "send": lambda tensor: ours.send(tensor, root),
    }
    return ways[operation]


def _at_once(ours: SharedCommunicator, operation: str, op: object, position: int | None, way: _Start) -> _Start:
    """``way``, but for plain tensors straight from here to C."""
    if operation not in _AT_ONCE:
        return way
    kind = _AT_ONCE[operation]

    def later(handle: int, *tensors: torch.Tensor) -> CclWork:
        return CclWork(ours, handle, tensors, kind.name.lower())

    reduce_op = parse_reduce_op("sum" if op is None else op)
    root = (position or 0) if kind in _ROOTED else -1
    shortcut = shared_memory.shortcut(ours.number, kind, reduce_op, root, later)
    if shortcut is None:
        return way

    def rest(done: bool | CclWork, *arguments: Any) -> CclWork | None:
        """Return what is left to wait for."""
        if done is True:
            return None
        return way(*arguments) if done is False else done

    def of_tensors(*tensors: torch.Tensor) -> CclWork | None:
        return rest(shortcut(*tensors), *tensors)

    def of_own(tensor: torch.Tensor, parts: None) -> CclWork | None:
        return rest(shortcut(tensor), tensor, parts)

    def from_list(tensor: torch.Tensor, inputs: list[torch.Tensor]) -> CclWork | None:
        return rest(shortcut(tensor, together(inputs, tensor)), tensor, inputs)

    def into_list(outputs: list[torch.Tensor], tensor: torch.Tensor) -> CclWork | None:
        memory, finish = landing(outputs, tensor)
        done: bool | CclWork = shortcut(memory, tensor)
        if done is False:
            return way(outputs, tensor) if operation == "all_gather" else way(tensor, outputs)
        if done is not True:
            return done.then(finish)
        finish()
        return None

    if operation == "all_gather":
        return into_list
    if operation in ("gather", "scatter"):
        if ours.rank != root:
            return of_own
        return from_list if operation == "scatter" else lambda tensor, outputs: into_list(outputs, tensor)
    return of_tensors


class _ByDtype(dict[torch.dtype, _Run]):
    """``runs[dtype]`` reduces elements of it."""

    def __init__(self, group: int, operation: Operation, op: int) -> None:
        super().__init__()
        self._settled = group, operation, op

    def __missing__(self, dtype: torch.dtype) -> _Run:
        group, operation, op = self._settled
        run = self[dtype] = oneccl_library.plan(group, operation, ONECCL_DTYPES[dtype], op, 0, LOOK_AROUND_S)
        return run


def _on_oneccl(ours: OneCclCommunicator, operation: str, op: object, position: int | None) -> _Start:
    group, size = ours.group, ours.size

    def later(handle: oneccl_library.Pending, kind: Operation, *tensors: torch.Tensor) -> CclWork:
        work = CclWork(ours, handle, tensors, kind.name.lower())
        if operation in ("recv", "send"):
            work.peer = position
        return work

    if operation in _OF_ELEMENTS:
        kind = _OF_ELEMENTS[operation]
        runs = _ByDtype(group, kind, ONECCL_OPS[parse_reduce_op(op)])

        def all_reduce(tensor: torch.Tensor) -> CclWork | None:
            address, count = tensor.data_ptr(), tensor.numel()
            if count and (handle := runs[tensor.dtype](address, address, count)) != oneccl_library.COMPLETE:
                return later(handle, kind, tensor)
            return None

        def reduce_scatter(output: torch.Tensor, input: torch.Tensor) -> CclWork | None:
            count = output.numel()
            if not count:
                return None
            handle = runs[output.dtype](input.data_ptr(), output.data_ptr(), count)
            return None if handle == oneccl_library.COMPLETE else later(handle, kind, output, input)

        return all_reduce if operation == "all_reduce" else reduce_scatter

    kind, none = _OF_BYTES[operation], [0] * size
    run = oneccl_library.plan(group, kind, ONECCL_DTYPES[torch.uint8], 0, position or 0, LOOK_AROUND_S)

    def on_one(tensor: torch.Tensor) -> CclWork | None:
        address, count = tensor.data_ptr(), tensor.nbytes
        if count and (handle := run(address, address, count)) != oneccl_library.COMPLETE:
            return later(handle, kind, tensor)
        return None

    def between(output: torch.Tensor, input: torch.Tensor) -> CclWork | None:
        count = input.nbytes // size if kind is Operation.ALL_TO_ALL else input.nbytes
        if not count:
            # The full way does not know that nobody has anything, and begins an operation.
            return ours.all_to_all(output, input, none, none) if kind is Operation.ALL_TO_ALL else None
        handle = run(input.data_ptr(), output.data_ptr(), count)
        return None if handle == oneccl_library.COMPLETE else later(handle, kind, output, input)

    def into_list(outputs: list[torch.Tensor], tensor: torch.Tensor) -> CclWork | None:
        memory, finish = landing(outputs, tensor)
        work = between(memory, tensor)
        if work is not None:
            return work.then(finish)
        finish()
        return None

    ways: dict[str, Callable[..., Any]] = {"broadcast": on_one, "recv": on_one, "send": on_one, "all_gather": into_list}
    return ways.get(operation, between)
