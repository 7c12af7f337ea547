"""Reductions that an engine lacks, for callers that come through ``torch.distributed``.

Calls through this project's own API never get here: ``comm_collectives.reduction`` builds the same over any backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from comm_backend_ccl.communicator import Communicator
from comm_backend_ccl.tables import DTYPES, ONECCL_OPS
from comm_backend_ccl.work import CclWork
from comm_utils.errors import ArgumentTypeError
from comm_utils.reduce_op import ReduceOp

__all__ = ["all_reduce", "check", "reduce", "reduce_scatter"]

_HALVES = (torch.float16, torch.bfloat16)
_BITS: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
# What an operation comes to on the bytes 0 and 1 of bools.
_ON_BOOLS = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.BAND: ReduceOp.MIN,
    ReduceOp.BOR: ReduceOp.MAX,
    ReduceOp.BXOR: ReduceOp.BXOR,
}


def check(op: ReduceOp, dtype: torch.dtype) -> None:
    """Raise ``ArgumentTypeError`` where ``op`` cannot be done with ``dtype``."""
    integers = not dtype.is_floating_point and not dtype.is_complex
    if op in _BITS and integers and dtype in DTYPES:
        return
    if op is ReduceOp.AVG and dtype.is_floating_point and dtype in DTYPES:
        return
    if op in ONECCL_OPS and dtype in DTYPES:
        return
    raise ArgumentTypeError(f"{op.name.lower()} of {dtype} cannot be reduced on ccl")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def all_reduce(communicator: Communicator, tensor: torch.Tensor, op: ReduceOp) -> CclWork:
    """Reduce ``tensor``, contiguous, in place."""
    if (op, tensor.dtype) in communicator.capabilities.reductions:
        return communicator.all_reduce(tensor, op, True)
    if tensor.dtype is torch.bool:
        return all_reduce(communicator, _bytes(tensor), _ON_BOOLS[op])
    if op in _BITS:
        gathered = tensor.new_empty((communicator.size, *tensor.shape))
        work = communicator.all_gather(gathered, tensor, True)
        work.finish = lambda: _fold(gathered, op, tensor)
        return work
    if op is ReduceOp.AVG:
        wide = tensor.float() if tensor.dtype in _HALVES else tensor
        work = communicator.all_reduce(wide, ReduceOp.SUM, True)
        work.finish = lambda: _divide(wide, communicator.size, tensor)
        return work
    return communicator.all_reduce(tensor, op, True)


def reduce(communicator: Communicator, tensor: torch.Tensor, root: int, op: ReduceOp) -> CclWork:
    """Reduce into ``tensor``, contiguous, of ``root``."""
    if (op, tensor.dtype) in communicator.capabilities.reductions:
        return communicator.reduce(tensor, root, op, True)
    mine = communicator.rank == root
    if tensor.dtype is torch.bool:
        return reduce(communicator, _bytes(tensor), root, _ON_BOOLS[op])
    if op in _BITS:
        gathered = tensor.new_empty((communicator.size, *tensor.shape)) if mine else None
        work = communicator.gather(gathered, tensor, root, True)
        if gathered is not None:
            work.finish = lambda: _fold(gathered, op, tensor)
        return work
    if op is ReduceOp.AVG:
        wide = tensor.float() if tensor.dtype in _HALVES else tensor
        work = communicator.reduce(wide, root, ReduceOp.SUM, True)
        if mine:
            work.finish = lambda: _divide(wide, communicator.size, tensor)
        return work
    return communicator.reduce(tensor, root, op, True)


def reduce_scatter(communicator: Communicator, output: torch.Tensor, input: torch.Tensor, op: ReduceOp) -> CclWork:
    """Overwrite ``output`` with this rank's part of the reduced ``input``, both contiguous."""
    if (op, output.dtype) in communicator.capabilities.reductions:
        return communicator.reduce_scatter(output, input, op, True)
    if output.dtype is torch.bool:
        return reduce_scatter(communicator, _bytes(output), _bytes(input), _ON_BOOLS[op])
    if op in _BITS:
        received = output.new_empty((communicator.size, *output.shape))
        work = communicator.all_to_all(received, input, watched=True)
        work.finish = lambda: _fold(received, op, output)
        return work
    if op is ReduceOp.AVG:
        half = output.dtype in _HALVES
        wide, source = (torch.empty(output.shape), input.float()) if half else (output, input)
        work = communicator.reduce_scatter(wide, source, ReduceOp.SUM, True)
        work.finish = lambda: _divide(wide, communicator.size, output)
        return work
    return communicator.reduce_scatter(output, input, op, True)


def _fold(parts: torch.Tensor, op: ReduceOp, target: torch.Tensor) -> None:
    target.copy_(functools.reduce(_BITS[op], parts))


def _divide(total: torch.Tensor, size: int, target: torch.Tensor) -> None:
    total /= size
    if total is not target:
        target.copy_(total)
