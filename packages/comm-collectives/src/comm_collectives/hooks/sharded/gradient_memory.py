"""Flat memory for gradients while they are reduced, used again by one bucket after another."""

from __future__ import annotations

import torch

from comm_collectives.annotations import Group
from comm_collectives.shared_tensors import empty_shared
from comm_utils.torch_support import factories

__all__ = ["GradientMemory"]


class GradientMemory:
    """Flat memory that buckets take and give back; on the CPU in shared memory, so that ranks reduce in place.

    Args:
        group: where it is to be used.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._free: list[torch.Tensor] = []
        self._taken: dict[int, torch.Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return (numel,) of any content."""
        if not numel:  # all such memory has one address
            return factories.empty(0, dtype=dtype, device=device)
        size_bytes = numel * dtype.itemsize
        fitting = [one for one in self._free if one.numel() >= size_bytes and one.device == device]
        if fitting:
            memory = min(fitting, key=torch.Tensor.numel)
            self._free = [one for one in self._free if one is not memory]
        else:
            self._free.clear()  # too small, and of no use beside a larger one
            shared = empty_shared(size_bytes, torch.uint8, self._group) if device.type == "cpu" else None
            memory = factories.empty(size_bytes, dtype=torch.uint8, device=device) if shared is None else shared
        self._taken[memory.data_ptr()] = memory
        return memory[:size_bytes].view(dtype)

    def give_back(self, memory: torch.Tensor) -> None:
        """Let :meth:`take` return ``memory`` again; nothing reads or writes it any more."""
        if memory.numel():
            self._free.append(self._taken.pop(memory.data_ptr()))

    def clear(self) -> None:
        """Give back the memory that no bucket uses."""
        self._free.clear()

    def tensors(self) -> list[torch.Tensor]:
        """Return all memory that it holds, uint8."""
        return [*self._free, *self._taken.values()]
