"""The interface of a library that is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from comm_orchestrator.facade import Compression
from comm_orchestrator.tools.bench.plan import Row

__all__ = ["Group", "Library", "UnsupportedError"]


class UnsupportedError(Exception):
    """The library does not do this at all; the message says why. Raised by all ranks alike."""


@dataclass(frozen=True)
class Group:
    """The group of this rank among those that measure at the same time.

    Attributes:
        members: its global ranks.
        rank: this one's place among them.
        all_members: of every group.
        is_world: there is one, of all ranks.
    """

    members: list[int]
    rank: int
    all_members: list[list[int]]

    @property
    def is_world(self) -> bool:
        return len(self.all_members) == 1


class Library(Protocol):
    """One library on one backend.

    Attributes:
        name: as in the results, such as ``"torch"``.
        backend: the library below, such as ``"gloo"``.
        device: where its tensors are.
        compression: what compresses its calls; None for nothing.
    """

    name: str
    backend: str
    device: torch.device
    compression: Compression | None

    def call(
        self, row: Row, way: str, source: torch.Tensor, target: torch.Tensor
    ) -> tuple[Callable[..., object], Sequence[object]]:
        """Return a function and its arguments that do ``row`` once on these tensors, which outlive it.

        Raises:
            UnsupportedError: it does not do this.
        """

    def close(self) -> None:
        """Free what was set up; called by all ranks in the same order."""
