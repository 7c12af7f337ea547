"""The properties that the calls of one fast path share, and the sets of operations that are alike."""

from __future__ import annotations

from typing import NamedTuple

from comm_backend_ccl.tables import Operation
from comm_utils.reduce_op import ReduceOp

__all__ = ["MESSAGES", "NATIVE", "PLANNED", "ROOTED_NATIVE", "TO_LISTS", "VALIDATED", "Kind"]


class Kind(NamedTuple):
    """The properties that all calls of one fast path share.

    Attributes:
        operation: as ``Backend.fast_path`` names it.
        name: the call of the user's, for messages.
        root: the group rank of the root or the peer.
        watched: the operation has to end even if nobody waits for it.
    """

    operation: str
    name: str
    op: ReduceOp
    root: int
    watched: bool


NATIVE = {
    "all_gather": Operation.ALL_GATHER,
    "all_gather_into_tensor": Operation.ALL_GATHER,
    "all_reduce": Operation.ALL_REDUCE,
    "all_to_all": Operation.ALL_TO_ALL_V,
    "all_to_all_single": Operation.ALL_TO_ALL_V,
    "barrier": Operation.BARRIER,
    "broadcast": Operation.BROADCAST,
    "gather": Operation.GATHER,
    "recv": Operation.RECEIVE,
    "reduce": Operation.REDUCE,
    "reduce_scatter": Operation.REDUCE_SCATTER,
    "reduce_scatter_tensor": Operation.REDUCE_SCATTER,
    "scatter": Operation.SCATTER,
    "send": Operation.SEND,
}
ROOTED_NATIVE = (Operation.BROADCAST, Operation.GATHER, Operation.REDUCE, Operation.SCATTER)
MESSAGES = frozenset(("recv", "send"))
TO_LISTS = frozenset(("all_gather", "all_to_all", "gather"))
#: Native code validates the tensors of these by itself.
VALIDATED = frozenset(
    (
        "all_gather_into_tensor",
        "all_reduce",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "reduce",
        "reduce_scatter_tensor",
    )
)
#: oneCCL has no fast path for the others.
PLANNED = frozenset(
    (
        "all_gather",
        "all_gather_into_tensor",
        "all_reduce",
        "all_to_all_single",
        "broadcast",
        "recv",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "send",
    )
)
