"""The exchange before a local reduction: each rank gets its part of every other rank's tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from comm_utils.backend import Backend, Work

__all__ = ["exchange_parts"]


def exchange_parts(
    backend: Backend,
    parts: torch.Tensor,
    input: torch.Tensor,
    sizes: Sequence[int],
    group: ProcessGroup | None,
    async_op: bool,
) -> Work | None:
    """Send part r, ``sizes[r]`` elements of ``input``, to rank r.

    Args:
        parts: (n,), of the dtype of ``input``; overwritten with W equal parts, in the order of the ranks.
    """
    # Equal parts are recorded as such, as by the fast path.
    rows, columns = (None, None) if len(set(sizes)) == 1 else (list(sizes), [len(parts) // len(sizes)] * len(sizes))
    return backend.all_to_all_single(parts, input, columns, rows, group, async_op)
