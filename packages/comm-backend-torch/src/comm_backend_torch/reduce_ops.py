"""The reduce ops and options of c10d."""

from __future__ import annotations

from typing import Any

import torch.distributed as c10d

from comm_utils.reduce_op import ReduceOp

__all__ = ["C10D_OPS", "set_async"]

C10D_OPS: dict[ReduceOp, Any] = {
    op: getattr(c10d.ReduceOp, op.name)
    for op in ReduceOp
    if op is not ReduceOp.UNUSED and hasattr(c10d.ReduceOp, op.name)
}


def set_async(options: Any, async_op: bool) -> Any:
    """Tell a device backend whether to stay on the current stream; torch before 2.7 has no such choice."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = async_op
    return options
