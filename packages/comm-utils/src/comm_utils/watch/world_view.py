"""The ranks of a world, as far as one of them can see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from comm_utils.flight_recorder.reader import RingReader
from comm_utils.flight_recorder.snapshot import RankSnapshot, take_snapshot
from comm_utils.rank_processes import NO_PROCESSES, RankProcess
from comm_utils.watch.local_ranks import LocalRanks
from comm_utils.watch.mailbox import Mailbox
from comm_utils.watch.remote_ranks import RemoteRanks

__all__ = ["WorldView"]

# How long ranks of other hosts have to answer.
_ASK_S = 0.8


class WorldView:
    """The ring of this rank, those of the other ranks of its host, and the way to ranks of other hosts.

    Args:
        own: the ring of this rank; None where it has none.
        path: of that ring; None where it is in no file, so that no other rank's is seen either.
        connect: opens the way to ranks of other hosts when it is needed.
        since_ns: when this process's earlier world ended, by the monotonic clock; 0 without one.
        processes: of the ranks, as far as they are known, for those that are not seen.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        own: RingReader | None,
        path: Path | None = None,
        connect: Callable[[], Mailbox | None] = lambda: None,
        since_ns: int = 0,
        processes: Mapping[int, RankProcess] = NO_PROCESSES,
    ) -> None:
        self.rank, self.world_size, self.own, self.processes = rank, world_size, own, processes
        self.local = LocalRanks(None if path is None else path.parent, path, world_size, since_ns)
        # No cycle: the server of the store ends with the last reference to it.
        self.remote = RemoteRanks(rank, connect, partial(_snapshot_of, own))

    @property
    def has_unseen_ranks(self) -> bool:
        """Return whether there are ranks whose rings are not on this host, or not yet."""
        return len(self.local.readers) < self.world_size - 1

    def snapshots(self, recent: int = 256) -> dict[int, RankSnapshot]:
        """Return what the ranks of this host do, by global rank.

        Args:
            recent: so many of the latest calls of each.
        """
        self.local.refresh(now=True)
        found = self.local.snapshots(recent)
        if self.own is not None:
            found[self.rank] = take_snapshot(self.own, recent=recent)
        return found

    def ask(
        self, ranks: Iterable[int], limit_s: float = _ASK_S, meanwhile: Callable[[], bool] = lambda: False
    ) -> dict[int, RankSnapshot]:
        """Return what ranks of other hosts say that they do; those that do not answer in time are left out.

        Args:
            meanwhile: ends the wait when it returns True.
        """
        return self.remote.ask_within(list(ranks), min(limit_s, _ASK_S), meanwhile)

    def close(self) -> None:
        """Unmap the rings of other ranks."""
        self.local.close()


def _snapshot_of(ring: RingReader | None) -> RankSnapshot | None:
    return None if ring is None else take_snapshot(ring)
