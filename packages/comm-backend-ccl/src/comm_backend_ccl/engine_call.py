"""A request to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from comm_backend_ccl.tables import Operation
from comm_utils.reduce_op import ReduceOp

__all__ = ["Call"]


class Call(NamedTuple):
    """A request to an engine; tensors are dense in memory and have matching sizes.

    Attributes:
        elements: of the whole tensor for all_reduce, reduce, broadcast and messages, else of a rank's part.
        watched: it has to come to an end even if nobody waits for it.
        source_counts, target_counts: elements for each rank, of all_to_all_v.
        tag: of a message.
        name: the user's call, for messages and records; "" is the operation.
    """

    operation: Operation
    source: torch.Tensor
    target: torch.Tensor
    elements: int
    op: ReduceOp = ReduceOp.SUM
    root: int = -1
    watched: bool = False
    source_counts: Sequence[int] = ()
    target_counts: Sequence[int] = ()
    tag: int = 0
    name: str = ""
