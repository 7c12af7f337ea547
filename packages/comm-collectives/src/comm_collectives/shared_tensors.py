"""Tensors whose memory the ranks of a host can reach, so that collectives on them need no copies in between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from math import prod
from typing import SupportsIndex

import torch
from torch.distributed import ProcessGroup

from comm_collectives.arguments import QUANTIZED, describe, enter, integer
from comm_collectives.keyword_errors import with_keyword_errors
from comm_utils import kernels
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = ["empty_shared", "shared_memory_stats"]

_STATISTICS = (
    "tensors",
    "used_bytes",
    "free_bytes",
    "retired_bytes",
    "peak_bytes",
    "bound_bytes",
    "descriptors",
)

# Sizes in bytes are signed integers of 64 bits, in torch and in the system; alignment is added to them.
_MOST_BYTES = 1 << 62


def _exbibytes(size_bytes: int) -> str:
    whole = size_bytes >> 60  # too large for a float, perhaps
    return f"{size_bytes / 2**60:.3g}" if whole < 1000 else "more than 1000"


def _sizes(shape: object) -> list[int]:
    """``shape`` as a list of ints; a single number stands for one dimension."""
    if isinstance(shape, int) or (isinstance(shape, SupportsIndex) and not getattr(shape, "shape", ())):
        return [integer("empty_shared", "shape", shape)]
    if isinstance(shape, (str, bytes, bytearray, Mapping, Set)) or not isinstance(shape, Iterable):
        raise ArgumentTypeError(f"empty_shared: shape: got {describe(shape)}; expected an integer, or a list of them")
    return [integer("empty_shared", "shape", one) for one in shape]


@with_keyword_errors
def empty_shared(
    shape: int | Sequence[int], dtype: torch.dtype | None = None, group: ProcessGroup | None = None
) -> torch.Tensor | None:
    """Return an uninitialised, contiguous tensor on the CPU, in memory that the other ranks of ``group`` can map.

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
        ArgumentError: a size is negative, or all together are more than 64 bits can address.
        BackendUnavailableError: there is not enough memory; says how much is needed.
    """
    backend = enter("empty_shared", group)
    if backend is None:
        return None
    sizes = _sizes(shape)
    if any(one < 0 for one in sizes):
        raise ArgumentError(f"empty_shared: shape: got {tuple(sizes)}; expected sizes of 0 and above")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(f"empty_shared: dtype: got {shown(dtype)}; expected a torch.dtype")
    if dtype in QUANTIZED:
        raise ArgumentError(
            f"empty_shared: dtype: got {dtype}, which needs scales as well; expected the dtype of its integers"
        )
    size_bytes = prod(sizes) * dtype.itemsize
    # Strides are computed as if no size were 0.
    if prod(max(one, 1) for one in sizes) * dtype.itemsize > _MOST_BYTES:
        raise ArgumentError(
            f"empty_shared: shape: got {tuple(sizes)!r:.200} of {dtype}, {_exbibytes(size_bytes)} EiB; expected "
            f"less than {_MOST_BYTES / 2**60:g} EiB, which is more than any machine has"
        )
    return backend.empty_shared(sizes, dtype, group)


def shared_memory_stats() -> dict[str, int]:
    """Return the memory that this process holds for :func:`empty_shared`; may be called at any time.

    Returns:
        ``tensors``: blocks of memory in use. ``used_bytes``: theirs. ``free_bytes``: kept for the next tensors, at most
        ``bound_bytes``; the rest was returned to the system. ``retired_bytes``: never used again, as a peer may still
        write there after a failure. ``peak_bytes``: the most in use at one time. ``descriptors``: open files. All are 0
        where no installed backend has such memory.
    """
    return dict.fromkeys(_STATISTICS, 0) | kernels.shared_memory_stats()
