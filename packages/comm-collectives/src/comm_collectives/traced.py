"""Calls made while ``torch.compile`` traces: they go to ``torch.distributed``'s own functions, which it can trace."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup

from comm_utils.backend import Work
from comm_utils.reduce_op import ReduceOp

__all__ = ["all_gather_into_tensor", "all_reduce", "all_to_all_single", "broadcast", "reduce_scatter_tensor"]

_C10D_OPS: dict[ReduceOp, Any] = {op: getattr(c10d.ReduceOp, op.name) for op in ReduceOp if op is not ReduceOp.UNUSED}
_BY_NAME = {op.name.lower(): c10d_op for op, c10d_op in _C10D_OPS.items()}


def _c10d_op(op: Any) -> Any:
    if isinstance(op, str):
        return _BY_NAME[op.lower()]
    return _C10D_OPS[op] if isinstance(op, ReduceOp) else op


def all_reduce(tensor: torch.Tensor, op: Any, group: ProcessGroup | None, async_op: bool) -> Work | None:
    work: Work | None = c10d.all_reduce(tensor, op=_c10d_op(op), group=group, async_op=async_op)
    return work


def broadcast(
    tensor: torch.Tensor, src: int | None, group: ProcessGroup | None, async_op: bool, group_src: int | None
) -> Work | None:
    work: Work | None = c10d.broadcast(tensor, src, group=group, async_op=async_op, group_src=group_src)
    return work


def all_gather_into_tensor(
    output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None, async_op: bool
) -> Work | None:
    work: Work | None = c10d.all_gather_into_tensor(output, input, group=group, async_op=async_op)
    return work


def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Any, group: ProcessGroup | None, async_op: bool
) -> Work | None:
    work: Work | None = c10d.reduce_scatter_tensor(output, input, op=_c10d_op(op), group=group, async_op=async_op)
    return work


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any,
    input_split_sizes: Any,
    group: ProcessGroup | None,
    async_op: bool,
) -> Work | None:
    work: Work | None = c10d.all_to_all_single(
        output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op
    )
    return work
