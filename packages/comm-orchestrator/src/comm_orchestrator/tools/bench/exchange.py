"""What ranks tell each other besides what is measured."""

from __future__ import annotations

from typing import Any

import torch

from comm_orchestrator import facade
from comm_orchestrator.tools.bench.libraries.torch_like import device_of

__all__ = ["Exchange"]


class Exchange:
    """Over the world, on its own backend."""

    def __init__(self) -> None:
        self.rank, self.ranks = facade.get_rank(), facade.get_world_size()
        self._device = device_of(facade.get_backend())

    def meet(self) -> None:
        """Return when all ranks have come here."""
        facade.barrier()

    def gather(self, numbers: list[float]) -> list[list[float]]:
        """Every rank's ``numbers``, as many on each."""
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        everyone = torch.empty((self.ranks, len(numbers)), dtype=torch.float64, device=self._device)
        facade.all_gather_into_tensor(everyone, own)
        found: list[list[float]] = everyone.tolist()
        return found

    def facts(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's ``own``: numbers and texts."""
        found: list[Any] = [None] * self.ranks
        facade.all_gather_object(found, own)
        return found
