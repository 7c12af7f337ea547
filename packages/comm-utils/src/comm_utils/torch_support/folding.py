"""Reducing on this rank what other ranks have sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from comm_utils import kernels
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support.flattening import count_versions

__all__ = ["FOLDED", "fold", "fold_compensated"]

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
#: The ops that :func:`fold` computes.
FOLDED = frozenset(_STEPS)
_ROUNDED_ONCE = frozenset((torch.float16, torch.bfloat16))
# Elements for which all temporaries stay in a core's cache.
_CHUNK = 1 << 14


def fold(parts: torch.Tensor, op: ReduceOp, out: torch.Tensor) -> None:
    """Reduce ``parts``, (W, n), over its first dimension into ``out``, (n,), as ``comm_utils.kernels.reduce`` does.

    With a kernel or without, the order is the same on every rank and at every size, and so are the bits, but for the
    sign of a zero that is a minimum or maximum.
    """
    inputs = parts.unbind()
    if kernels.reduce(out, inputs, op):
        if not out.is_inference():
            count_versions([out])  # as torch does in what it writes
        return
    step = _STEPS[op]

    def tree(some: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(some) == 1:
            return some[0].float() if parts.dtype in _ROUNDED_ONCE else some[0]
        left = 1 << (len(some) - 1).bit_length() - 1
        return step(tree(some[:left]), tree(some[left:]))

    total = tree(inputs)
    out.copy_(total / len(inputs) if op is ReduceOp.AVG else total)


def fold_compensated(parts: torch.Tensor, op: ReduceOp, out: torch.Tensor) -> None:
    """Add ``parts``, (W, n), of a float dtype, over its first dimension into ``out``, (n,), with their rounding errors.

    16-bit floats are added in float32. The error of a sum is at most u * abs(sum) + g(W)**2 * sum(abs(parts)), where u
    is half the distance from 1 to the next number, and g(W) = (W-1) * u / (1 - (W-1) * u): as if it were added with
    twice the digits and rounded once. An average is divided after that rounding. Where a sum overflows, the result is
    infinite or NaN, as without compensation.

    Source: algorithm 4.4 (Sum2) and proposition 4.5 of Ogita, Rump, Oishi: "Accurate sum and dot product", SIAM
    Journal on Scientific Computing 26 (2005), with Knuth's TwoSum.

    Args:
        op: SUM or AVG; :func:`fold` does all others.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        fold(parts, op, out)
        return
    for begin in range(0, parts.shape[1], _CHUNK):
        columns = parts[:, begin : begin + _CHUNK]
        if parts.dtype in _ROUNDED_ONCE:
            columns = columns.float()
        total, lost = columns[0], torch.zeros_like(columns[0])
        for part in columns[1:]:
            added = total + part
            back = added - total
            lost += (total - (added - back)) + (part - back)
            total = added
        total = torch.where(lost.isfinite() & (lost != 0), total + lost, total)  # a sum of -0 stays -0
        out[begin : begin + _CHUNK].copy_(total / len(parts) if op is ReduceOp.AVG else total)
