"""oneCCL's codes for dtypes and reductions."""

from __future__ import annotations

import torch

from comm_utils.backend import OPERATIONS, Capabilities
from comm_utils.reduce_op import ReduceOp

__all__ = ["CAPABILITIES", "DTYPES", "OPS"]

#: ``ccl::datatype``
DTYPES: dict[torch.dtype, int] = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int16: 2,
    torch.uint16: 3,
    torch.int32: 4,
    torch.uint32: 5,
    torch.int64: 6,
    torch.uint64: 7,
    torch.float16: 8,
    torch.float32: 9,
    torch.float64: 10,
    torch.bfloat16: 11,
}

#: ``ccl::reduction``
OPS: dict[ReduceOp, int] = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MIN: 2, ReduceOp.MAX: 3}

# With these torch cannot compute, which parts of a collective may need.
_LEFT_OUT = (torch.uint16, torch.uint32, torch.uint64)

#: Averages of 16-bit floats are to be rounded once, and oneCCL has no bit operations: both are built above.
CAPABILITIES = Capabilities(
    reductions=frozenset((op, dtype) for op in OPS for dtype in DTYPES if dtype not in _LEFT_OUT),
    dtypes=frozenset((*DTYPES, torch.bool)),
    operations=OPERATIONS,
    preserving_reduce=True,
)
