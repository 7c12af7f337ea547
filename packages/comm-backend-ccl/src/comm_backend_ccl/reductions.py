"""Reductions for callers that come through ``torch.distributed``, whatever the engine lacks.

Calls through this project's own API never get here: ``comm_collectives.reduction`` does the same over any backend.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from comm_backend_ccl.arguments import is_integer_average
from comm_backend_ccl.communicator import Communicator
from comm_backend_ccl.work import CclWork
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support.passed_tensors import passing_as
from comm_utils.torch_support.reduction_encoding import encoding_for

__all__ = ["all_reduce", "reduce", "reduce_scatter"]


def all_reduce(communicator: Communicator, tensor: torch.Tensor, op: ReduceOp) -> CclWork:
    """Reduce ``tensor``, contiguous, in place."""
    if is_integer_average(op, tensor.dtype):
        return all_reduce(communicator, tensor, ReduceOp.SUM).then(_divide(tensor, communicator))
    encoding = encoding_for("all_reduce", op, tensor.dtype, communicator.capabilities)
    elements = tensor.view(-1)
    wire = encoding.encode(elements)
    if encoding.native:
        with passing_as(tensor, wire):
            work = communicator.all_reduce(wire, encoding.op, True)
        return work.then(encoding.decoder(wire, elements, communicator.size))
    parts, sent = wire.new_empty(communicator.size, wire.numel()), _bytes(wire)
    with passing_as(tensor, sent):
        work = communicator.all_gather(_bytes(parts), sent, True, "all_reduce")
    return work.then(encoding.folder(parts, elements))


def reduce(communicator: Communicator, tensor: torch.Tensor, root: int, op: ReduceOp) -> CclWork:
    """Reduce into ``tensor``, contiguous, of ``root``."""
    if is_integer_average(op, tensor.dtype):
        work = reduce(communicator, tensor, root, ReduceOp.SUM)
        return work.then(_divide(tensor, communicator) if communicator.rank == root else None)
    encoding = encoding_for("reduce", op, tensor.dtype, communicator.capabilities)
    elements = tensor.view(-1)
    wire = encoding.encode(elements)
    is_root = communicator.rank == root
    if encoding.native:
        with passing_as(tensor, wire):
            work = communicator.reduce(wire, root, encoding.op, True)
        return work.then(encoding.decoder(wire, elements, communicator.size)) if is_root else work
    parts = wire.new_empty(communicator.size, wire.numel()) if is_root else None
    sent = _bytes(wire)
    with passing_as(tensor, sent):
        work = communicator.gather(None if parts is None else _bytes(parts), sent, root, True, "reduce")
    return work if parts is None else work.then(encoding.folder(parts, elements))


def reduce_scatter(
    communicator: Communicator, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, name: str
) -> CclWork:
    """Overwrite ``output`` with this rank's part of the reduced ``input``, both contiguous, in a call ``name``."""
    if is_integer_average(op, output.dtype):
        work = reduce_scatter(communicator, output, input, ReduceOp.SUM, name)
        return work.then(_divide(output, communicator))
    encoding = encoding_for("reduce_scatter", op, output.dtype, communicator.capabilities)
    elements = output.view(-1)
    wire = encoding.encode(input.view(-1))
    part = wire.numel() // communicator.size
    if encoding.native:
        received = encoding.encode(elements) if encoding.shares else wire.new_empty(part)
        with passing_as(input, wire):
            work = communicator.reduce_scatter(received, wire, encoding.op, True, name)
        return work.then(encoding.decoder(received, elements, communicator.size))
    parts, sent = wire.new_empty(communicator.size, part), _bytes(wire)
    with passing_as(input, sent):
        work = communicator.all_to_all(_bytes(parts), sent, watched=True, name=name)
    return work.then(encoding.folder(parts, elements))


def _divide(tensor: torch.Tensor, communicator: Communicator) -> Callable[[], None]:
    """Return what turns sums of integers into averages: towards zero, as NCCL divides (``FuncSumPostDiv``)."""

    def finish() -> None:
        tensor.div_(communicator.size, rounding_mode="trunc")

    return finish


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
