"""Reducing on this rank what other ranks have sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from comm_utils import kernels
from comm_utils.reduce_op import ReduceOp

__all__ = ["fold"]

_STEPS: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_ROUNDED_ONCE = frozenset((torch.float16, torch.bfloat16))


def fold(parts: torch.Tensor, op: ReduceOp, out: torch.Tensor) -> None:
    """Reduce ``parts``, (W, n), over its first dimension into ``out``, (n,), as ``comm_utils.kernels.reduce`` does.

    With a kernel or without, the order is the same on every rank and at every size, and so are the bits, but for the
    sign of a zero that is a minimum or maximum.
    """
    inputs = parts.unbind()
    if kernels.reduce(out, inputs, op):
        return
    step = _STEPS[op]

    def tree(some: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(some) == 1:
            return some[0].float() if parts.dtype in _ROUNDED_ONCE else some[0]
        left = 1 << (len(some) - 1).bit_length() - 1
        return step(tree(some[:left]), tree(some[left:]))

    total = tree(inputs)
    out.copy_(total / len(inputs) if op is ReduceOp.AVG else total)
