"""Native kernels for every layer; named by the entry points ``comm_utils.kernels``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from comm_backend_ccl import shared_memory
from comm_backend_ccl.tables import DTYPES, IN_SHARED_MEMORY
from comm_utils.reduce_op import ReduceOp

__all__ = ["reduce"]


def reduce(output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp) -> bool:
    """See ``comm_utils.kernels.reduce``; of plain, contiguous tensors on the CPU."""
    dtype, shape = output.dtype, output.shape
    possible = shared_memory.has_kernels() and (op, dtype) in IN_SHARED_MEMORY.reductions
    if not possible or not 0 < len(inputs) <= shared_memory.MOST_RANKS:
        return False
    for tensor in (output, *inputs):
        if (
            type(tensor) is not torch.Tensor
            or tensor.dtype is not dtype
            or tensor.shape != shape
            or tensor.device.type != "cpu"
            or not tensor.is_contiguous()
            or tensor.is_neg()
        ):
            return False
    shared_memory.reduce(DTYPES[dtype], op, output.data_ptr(), [tensor.data_ptr() for tensor in inputs], output.numel())
    return True
