"""The order in which ranks' elements are added, where it is to be the same for every size, split and library."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from enum import Enum
from functools import cache

import torch
from torch.distributed import ProcessGroup

from comm_collectives.by_group import GroupSettings
from comm_utils.backend import Backend, Capabilities
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support import factories
from comm_utils.torch_support.folding import fold, fold_compensated
from comm_utils.torch_support.reduction_encoding import encoding_for, refusal

__all__ = ["FoldParts", "Order", "forget_orders", "needed_order", "order_of", "ordered_dtypes", "set_order"]

#: Adds the parts of all ranks, (W, n), into the second tensor, (n,).
FoldParts = Callable[[torch.Tensor, torch.Tensor], None]

#: Dtypes on which the order of additions shows.
INEXACT = frozenset(
    (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex32,
        torch.complex64,
        torch.complex128,
    )
)
_WIDE = frozenset((torch.float32, torch.float64))


class Order(Enum):
    """A rule for adding the elements of all ranks."""

    FIXED = "on"
    COMPENSATED = "compensated"

    def fold_of(self, op: ReduceOp) -> FoldParts:
        """Return the function that reduces by ``op`` what one rank has received."""
        adds = fold if self is Order.FIXED else fold_compensated
        return lambda parts, into: adds(parts, op, into)


_orders: GroupSettings[Order | None] = GroupSettings(None)


def set_order(order: Order | None, group: ProcessGroup | None) -> None:
    """Add in this order on ``group``; None as the group is for all without their own, None as the order for any."""
    _orders.set(order, group)


def forget_orders() -> None:
    """Add in any order in the world to come."""
    _orders.forget()


def order_of(group: ProcessGroup | None) -> Order | None:
    """Return the order that was set for ``group``; None for any."""
    return _orders.of(group)


def needed_order(
    group: ProcessGroup | None, op: ReduceOp, dtype: torch.dtype, capabilities: Capabilities, W: int
) -> Order | None:
    """Return the order that this layer has to see to; None where any order will do, or the library has this one."""
    order = order_of(group)
    if order is None or W == 1 or dtype not in INEXACT:
        return None
    if W == 2 or op not in (ReduceOp.SUM, ReduceOp.AVG):
        # A sum of two is rounded once, which is all that compensation achieves.
        order = Order.FIXED
    if order is Order.FIXED and (capabilities.fixed_order or (W == 2 and _is_wide(op, dtype, capabilities))):
        return None
    return order


@cache
def _is_wide(op: ReduceOp, dtype: torch.dtype, capabilities: Capabilities) -> bool:
    """Return whether the library reduces this in a dtype in which it does not matter which of two comes first.

    Of 16-bit floats, libraries round as they like.
    """
    if op in (ReduceOp.MIN, ReduceOp.MAX) or refusal(op, dtype) is not None:
        return False  # of NaN and a number, a library may take the first
    encoding = encoding_for("", op, dtype, capabilities)
    if not encoding.native:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that complex numbers of 16-bit floats are experimental
        return encoding.encode(factories.empty(0, dtype=dtype)).dtype in _WIDE


def ordered_dtypes(backend: Backend, op: ReduceOp, group: ProcessGroup | None) -> frozenset[torch.dtype]:
    """Return the dtypes whose reductions this layer has to order, so that no fast path of the backend may do them."""
    if order_of(group) is None:
        return frozenset()
    W = backend.get_world_size(group)
    every = [backend.capabilities(group, device) for device in backend.device_types(group)]
    return frozenset(dtype for dtype in INEXACT for one in every if needed_order(group, op, dtype, one, W) is not None)
