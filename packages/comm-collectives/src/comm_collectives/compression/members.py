"""The group and the rank in it that the state of an error feedback belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup

from comm_utils.backend import Backend

__all__ = ["Members"]


@dataclass(frozen=True)
class Members:
    """A rank of a group.

    Attributes:
        rank: its group rank.
        world_size: of the group.
        ranks: the global ranks of the group; None of a state that was resharded and not used yet.
    """

    rank: int
    world_size: int
    ranks: tuple[int, ...] | None

    @classmethod
    def of(cls, backend: Backend, group: ProcessGroup | None) -> Members:
        """Return the members of ``group``."""
        ranks = tuple(backend.get_process_group_ranks(group))
        return cls(backend.get_rank(group), len(ranks), ranks)

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> Members | None:
        """Return those of a saved state; None where it says nothing of them."""
        if "world_size" not in saved:
            return None
        ranks = saved.get("ranks")
        return cls(saved["rank"], saved["world_size"], None if ranks is None else tuple(ranks))

    def saved(self) -> dict[str, Any]:
        """Return what :meth:`loaded` takes."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "ranks": None if self.ranks is None else list(self.ranks),
        }
