"""The memory that a sharded model takes on one rank, measured from the storages of its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from comm_collectives.hooks.sharded.freed_parameter import as_gathered

__all__ = ["MemoryUse", "storage_bytes"]


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on this rank; memory that several tensors share counts once.

    Attributes:
        parameter_bytes: parameters and this rank's parts of them.
        gradient_bytes: gradients, and flat memory that holds or is kept for them.
        optimizer_bytes: the state of the optimizers.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of ``tensors``, each storage once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        with as_gathered():
            storage = tensor.untyped_storage()
        if storage.nbytes():
            # Memory of empty_shared may be of one allocation, and is one storage for each tensor all the same.
            sizes[storage.data_ptr()] = max(sizes.get(storage.data_ptr(), 0), storage.nbytes())
    return sum(sizes.values())
