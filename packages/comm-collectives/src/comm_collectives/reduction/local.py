"""Reducing on this rank what other ranks have sent, in rank order."""

from __future__ import annotations

from collections.abc import Callable

import torch

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
    """Reduce ``parts``, (W, n), over its first dimension into ``out``, (n,), from rank 0 upwards.

    The order is the same on every rank and at every size, and 16-bit floats are accumulated in float32 and rounded
    once.
    """
    step = _STEPS[op]
    total = parts[0].float() if parts.dtype in _ROUNDED_ONCE else parts[0].clone()
    for part in parts[1:]:
        step(total, part, out=total)
    if op is ReduceOp.AVG:
        total /= parts.shape[0]
    out.copy_(total)
