"""Calls made while ``torch.compile`` traces.

What ``torch.distributed`` can trace, and the group's library does as we promise, becomes part of the graph. The rest is
called outside of it (:mod:`.graph_breaks`), wrong calls among them, so that their errors are the usual ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup

from comm_collectives import graph_breaks
from comm_utils.backend import Work
from comm_utils.reduce_op import ReduceOp

__all__ = [
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "inference_all_reduce",
    "reduce_scatter_tensor",
]

_C10D_OPS: dict[ReduceOp, Any] = {
    op: getattr(c10d.ReduceOp, op.name)
    for op in ReduceOp
    if op is not ReduceOp.UNUSED and hasattr(c10d.ReduceOp, op.name)
}
_BY_NAME = {op.name.lower(): c10d_op for op, c10d_op in _C10D_OPS.items()}


def _traceable(operation: str, op: Any, group: ProcessGroup | None, *tensors: Any) -> bool:
    first = tensors[0]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != first.dtype or tensor.device != first.device:
            return False
        if hasattr(tensor, "to_local"):
            return False
        if tensor.is_complex() or not tensor.is_contiguous() or (tensor.requires_grad and torch.is_grad_enabled()):
            return False
    return graph_breaks.serves(operation, op, first.dtype, first.device.type, group)


def _c10d_op(op: Any) -> Any:
    if isinstance(op, str):
        return _BY_NAME[op.lower()]
    return _C10D_OPS[op] if isinstance(op, ReduceOp) else op


def all_reduce(
    tensor: torch.Tensor,
    op: Any,
    group: ProcessGroup | None,
    async_op: bool,
    timeout: float | timedelta | None,
    compression: Any = None,
) -> Work | None:
    if async_op or timeout is not None or compression is not None or not _traceable("all_reduce", op, group, tensor):
        outcome: Work | None = graph_breaks.all_reduce(
            tensor, op, group, async_op, timeout=timeout, compression=compression
        )
        return outcome
    c10d.all_reduce(tensor, op=_c10d_op(op), group=group)
    return None


def inference_all_reduce(
    tensor: torch.Tensor,
    op: Any,
    group: ProcessGroup | None,
    async_op: bool,
    timeout: float | timedelta | None,
    compression: Any = None,
) -> Work | None:
    if async_op or timeout is not None or compression is not None or not _traceable("all_reduce", op, group, tensor):
        outcome: Work | None = graph_breaks.inference_all_reduce(
            tensor, op, group, async_op, timeout=timeout, compression=compression
        )
        return outcome
    c10d.all_reduce(tensor, op=_c10d_op(op), group=group)
    return None


def all_gather_into_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    async_op: bool,
    timeout: float | timedelta | None,
    compression: Any = None,
) -> Work | None:
    call = "all_gather_into_tensor"
    if (
        async_op
        or timeout is not None
        or compression is not None
        or not _traceable(call, graph_breaks.NO_OP, group, output, input)
        or output.numel() != c10d.get_world_size(group) * input.numel()
    ):
        outcome: Work | None = graph_breaks.all_gather_into_tensor(
            output, input, group, async_op, timeout=timeout, compression=compression
        )
        return outcome
    c10d.all_gather_into_tensor(output.view(-1), input.view(-1), group=group)
    return None


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any,
    group: ProcessGroup | None,
    async_op: bool,
    timeout: float | timedelta | None,
    compression: Any = None,
) -> Work | None:
    call = "reduce_scatter_tensor"
    if (
        async_op
        or timeout is not None
        or compression is not None
        or not _traceable(call, op, group, output, input)
        or input.numel() != c10d.get_world_size(group) * output.numel()
    ):
        outcome: Work | None = graph_breaks.reduce_scatter_tensor(
            output, input, op, group, async_op, timeout=timeout, compression=compression
        )
        return outcome
    c10d.reduce_scatter_tensor(output.view(-1), input.view(-1), op=_c10d_op(op), group=group)
    return None


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: ProcessGroup | None,
    async_op: bool,
    timeout: float | timedelta | None,
    compression: Any = None,
) -> Work | None:
    if (
        async_op
        or timeout is not None
        or compression is not None
        or not _traceable("all_to_all_single", graph_breaks.NO_OP, group, output, input)
        or output.shape[1:] != input.shape[1:]
        or not _split(output, output_split_sizes, group)
        or not _split(input, input_split_sizes, group)
    ):
        outcome: Work | None = graph_breaks.all_to_all_single(
            output,
            input,
            output_split_sizes,
            input_split_sizes,
            group,
            async_op,
            timeout=timeout,
            compression=compression,
        )
        return outcome
    c10d.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group=group)
    return None


def _split(tensor: torch.Tensor, sizes: Any, group: ProcessGroup | None) -> bool:
    """Return whether ``sizes``, or equal ones for None, are those of the rows of ``tensor``."""
    W = c10d.get_world_size(group)
    if tensor.dim() == 0:
        return False
    if sizes is None:
        return tensor.shape[0] % W == 0
    return isinstance(sizes, (list, tuple)) and len(sizes) == W and sum(sizes) == tensor.shape[0]
