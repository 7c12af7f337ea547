"""Tensors whose memory the ranks of a host can reach, so that collectives on them need no copies in between."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from comm_collectives.arguments import enter, integer
from comm_utils.errors import ArgumentError, ArgumentTypeError

__all__ = ["empty_shared"]


def empty_shared(
    shape: int | Sequence[int], dtype: torch.dtype | None = None, group: ProcessGroup | None = None
) -> torch.Tensor | None:
    """An uninitialised, contiguous tensor on the CPU, in memory that the other ranks of ``group`` can map.

    It is an ordinary tensor: views of it, its ``.data`` as a parameter's, gradients in it, all stay where they are. A
    large ``all_reduce``, ``all_gather_into_tensor``, ``reduce_scatter_tensor``, ``all_to_all_single`` or ``broadcast``
    works on the tensors themselves where the tensor of every rank (of the root, for ``broadcast``) is of this kind.
    Each rank may call it when it likes. Where the group's backend has no such memory, the tensor is like any other.

    Args:
        shape: an int or a sequence of ints.
        dtype: None is torch's default dtype.
        group: where the tensor is to be used; memory is shared by all groups of a host.

    Returns:
        The tensor; None on a rank that is not in ``group``.

    Raises:
        BackendUnavailableError: there is not enough memory; says how much is needed.
    """
    backend = enter("empty_shared", group)
    if backend is None:
        return None
    sizes = [shape] if isinstance(shape, int) else list(shape)
    sizes = [integer("empty_shared", "shape", one) for one in sizes]
    if any(one < 0 for one in sizes):
        raise ArgumentError(f"empty_shared: shape: got {tuple(sizes)}; expected sizes of 0 and above")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(f"empty_shared: dtype: got {dtype!r:.60}; expected a torch.dtype")
    return backend.empty_shared(sizes, dtype, group)
