"""The shortest way from tensors to oneCCL: one call into the library for an operation that is over at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from comm_backend_ccl import native
from comm_backend_ccl.communicator import Communicator
from comm_backend_ccl.layout import spread
from comm_backend_ccl.native import Operation
from comm_backend_ccl.tables import DTYPES, OPS
from comm_backend_ccl.work import LOOK_AROUND_S, CclWork
from comm_utils.reduce_op import parse_reduce_op

__all__ = ["short_way"]

_Run = Callable[[int, int, int], native.Pending]

_OF_BYTES = {
    "all_gather": Operation.ALL_GATHER,
    "all_gather_into_tensor": Operation.ALL_GATHER,
    "all_to_all_single": Operation.ALL_TO_ALL,
    "broadcast": Operation.BROADCAST,
    "recv": Operation.RECEIVE,
    "send": Operation.SEND,
}
_OF_ELEMENTS = {"all_reduce": Operation.ALL_REDUCE, "reduce_scatter_tensor": Operation.REDUCE_SCATTER}


class _ByDtype(dict[torch.dtype, _Run]):
    """``runs[dtype]`` reduces elements of it."""

    def __init__(self, group: int, operation: Operation, op: int) -> None:
        super().__init__()
        self._settled = group, operation, op

    def __missing__(self, dtype: torch.dtype) -> _Run:
        group, operation, op = self._settled
        run = self[dtype] = native.plan(group, operation, DTYPES[dtype], op, 0, LOOK_AROUND_S)
        return run


def short_way(ours: Communicator, operation: str, op: object, position: int | None) -> Callable[..., CclWork | None]:
    """A function of tensors, as ``Backend.prepare`` describes them, that does ``operation``.

    It returns None where that is done, else a handle to wait for.
    """
    group, size = ours.group, ours.size

    def later(handle: native.Pending, kind: Operation, *tensors: torch.Tensor) -> CclWork:
        work = CclWork(ours, handle, tensors, kind)
        if operation in ("recv", "send"):
            work.peer = position
        return work

    if operation == "barrier":
        return lambda: ours.barrier()
    if operation in _OF_ELEMENTS:
        kind = _OF_ELEMENTS[operation]
        runs = _ByDtype(group, kind, OPS[parse_reduce_op(op)])

        def all_reduce(tensor: torch.Tensor) -> CclWork | None:
            address, count = tensor.data_ptr(), tensor.numel()
            if count and (handle := runs[tensor.dtype](address, address, count)) != native.COMPLETE:
                return later(handle, kind, tensor)
            return None

        def reduce_scatter(output: torch.Tensor, input: torch.Tensor) -> CclWork | None:
            count = output.numel()
            if not count:
                return None
            handle = runs[output.dtype](input.data_ptr(), output.data_ptr(), count)
            return None if handle == native.COMPLETE else later(handle, kind, output, input)

        return all_reduce if operation == "all_reduce" else reduce_scatter

    kind = _OF_BYTES[operation]
    run = native.plan(group, kind, DTYPES[torch.uint8], 0, position or 0, LOOK_AROUND_S)

    def on_one(tensor: torch.Tensor) -> CclWork | None:
        address, count = tensor.data_ptr(), tensor.nbytes
        if count and (handle := run(address, address, count)) != native.COMPLETE:
            return later(handle, kind, tensor)
        return None

    def between(output: torch.Tensor, input: torch.Tensor) -> CclWork | None:
        count = input.nbytes // size if kind is Operation.ALL_TO_ALL else input.nbytes
        if not count:
            return None
        handle = run(input.data_ptr(), output.data_ptr(), count)
        return None if handle == native.COMPLETE else later(handle, kind, output, input)

    def into_list(outputs: list[torch.Tensor], tensor: torch.Tensor) -> CclWork | None:
        together = tensor.new_empty(tensor.numel() * size)
        work = between(together, tensor)
        if work is None:
            spread(together, outputs)
        else:
            work.finish = lambda: spread(together, outputs)
        return work

    ways: dict[str, Callable[..., Any]] = {"broadcast": on_one, "recv": on_one, "send": on_one, "all_gather": into_list}
    return ways.get(operation, between)
