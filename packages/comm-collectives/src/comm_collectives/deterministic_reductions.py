"""Reductions whose results depend on the ranks' elements alone."""

from __future__ import annotations

from comm_collectives.annotations import Group
from comm_collectives.arguments import as_flag, enter
from comm_collectives.compression.agreement import Agreement
from comm_collectives.keyword_errors import with_keyword_errors
from comm_collectives.reduction.order import Order, set_order

__all__ = ["set_deterministic_reductions"]


@with_keyword_errors
def set_deterministic_reductions(enabled: bool = True, group: Group = None, *, compensated: bool = False) -> None:
    """Make each element of a reduction on ``group`` a function of the ranks' elements alone, on every library.

    With this, its bits do not depend on the tensor that it is in, its place there, how tensors are split or put
    together, the library, or timing. It concerns ``all_reduce``, ``reduce`` and ``reduce_scatter`` in all their forms,
    for floating and complex dtypes. Elements are added as a balanced binary tree in the order of the ranks, 16-bit ones
    in float32.

    All ranks of the group call this alike, with no operation under way: they compare their arguments first.

    Args:
        enabled: False for whatever order the library has.
        group: None for the world group and all groups that have no setting of their own.
        compensated: add the rounding errors of sums and averages back (``comm_utils.torch_support.folding``).

    Raises:
        CollectiveMismatchError: the ranks gave different arguments; on every rank, and nothing has changed.
    """
    call = "set_deterministic_reductions"
    enabled, compensated = as_flag(call, "enabled", enabled), as_flag(call, "compensated", compensated)
    backend = enter(call, group)
    if backend is None:
        return
    order = (Order.COMPENSATED if compensated else Order.FIXED) if enabled else None
    what = f"{call}(enabled={enabled}, compensated={compensated})"
    Agreement(backend, group, what, subject="deterministic reductions, which stay as they were").check()
    set_order(order, group)
