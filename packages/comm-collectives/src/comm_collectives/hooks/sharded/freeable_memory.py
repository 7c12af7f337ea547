"""Memory that is freed while tensors still share it, such as what autograd saved of a parameter in stage 3."""

from __future__ import annotations

import torch

__all__ = ["FreeableMemory"]


class FreeableMemory:
    """Flat memory of one tensor, with zeros at first.

    Args:
        numel, dtype, device: of the tensor.

    Attributes:
        tensor: (numel,). While the memory is freed, it and what shares its memory have an empty storage: torch's
            kernels do not look for memory that is missing, so a read ends the process.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(numel, dtype=dtype, device=device)
        self._size_bytes = numel * dtype.itemsize

    @property
    def references(self) -> int:
        """Return how many tensors share the memory, as Python's variables or in a graph of autograd."""
        count: int = torch._C._storage_Use_Count(self.tensor.untyped_storage()._cdata)
        return count

    def allocate(self) -> None:
        """Have memory again after :meth:`free`, with any values; nothing to do where it was not freed."""
        self.tensor.untyped_storage().resize_(self._size_bytes)

    def free(self) -> None:
        """Give the memory back."""
        self.tensor.untyped_storage().resize_(0)
