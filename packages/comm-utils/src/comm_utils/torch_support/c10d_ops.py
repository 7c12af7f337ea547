"""The reduce ops of c10d."""

from __future__ import annotations

from typing import Any

import torch.distributed as c10d

from comm_utils.reduce_op import ReduceOp

__all__ = ["C10D_OPS"]

#: Without those that this release of torch does not have.
C10D_OPS: dict[ReduceOp, Any] = {
    op: getattr(c10d.ReduceOp, op.name)
    for op in ReduceOp
    if op is not ReduceOp.UNUSED and hasattr(c10d.ReduceOp, op.name)
}
