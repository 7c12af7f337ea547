"""Compares the calls of this rank with those of other ranks of its host while they are made."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Mapping

from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.differing_calls import mismatches_of
from comm_utils.flight_recorder.findings import Finding
from comm_utils.flight_recorder.reader import RingReader
from comm_utils.flight_recorder.scanning import calls_numbered
from comm_utils.process_state import GONE
from comm_utils.watch.comparison import (
    complete_within_s,
    disagreement,
    mismatch,
    native_disagreement,
    native_mismatch,
    neighbours,
)
from comm_utils.watch.trouble import Trouble
from comm_utils.watch.world_view import WorldView

__all__ = ["CallComparison"]

# Split sizes of a group are compared so often, of so many calls.
_PARTS_EVERY_S, _RECENT_PARTS = 0.5, 32
# Of shared memory, which compares calls itself unless none follows: so many of the latest are looked at.
_RECENT_NATIVE = 256


class CallComparison:
    """Compares digests of calls as long as there are new ones, and split sizes, which differ by right, now and then.

    Args:
        broken: the groups that are in trouble already.
        raised: the groups of which a call of this rank has raised an error.
    """

    def __init__(
        self, view: WorldView, own: RingReader, broken: Container[str], raised: Container[str] = frozenset()
    ) -> None:
        self._view, self._own, self._broken, self._raised = view, own, broken, raised
        # By group, when a call that differs was found to which some ranks have not come.
        self._incomplete_since: dict[str, float] = {}
        # By rank, how many calls both rings had when they were compared; of native code, the depth first.
        self._compared: dict[int, int] = {}
        self._compared_native: dict[int, tuple[int, int, int]] = {}
        self._next_parts_at: dict[str, float] = {}
        # How many groups and rings there were, and the ranks of this host that this one is compared with.
        self._next_to_this: tuple[tuple[int, int], list[int]] = ((-1, -1), [])

    def look(self, thoroughly: bool = False) -> Iterator[tuple[str, Trouble]]:
        """Yield the groups in which this rank and the next ranks of this host have made different calls.

        Args:
            thoroughly: compare all calls of shared memory that the rings have, not the latest ones only.
        """
        yield from self._look_at_python(not thoroughly)
        yield from self._look_at_native(self._own.records if thoroughly else _RECENT_NATIVE, not thoroughly)

    def _look_at_native(self, depth: int, waits: bool) -> Iterator[tuple[str, Trouble]]:
        count = self._own.count(1)
        if not count:
            return
        for rank, reader in self._neighbours():
            theirs = reader.count(1)
            if not theirs or self._compared_native.get(rank) == (depth, count, theirs):
                continue
            self._compared_native[rank] = depth, count, theirs
            reader.refresh()
            for name, number in native_disagreement(self._own, reader, depth):
                group = None if name in self._raised else self._group(name)
                found = None if group is None else native_mismatch(group, self._rings(), number)
                if found is None:
                    continue
                if waits and self._may_name_more(found, lane=1):
                    self._compared_native.pop(rank, None)
                else:
                    yield name, Trouble.of(found)

    def _may_name_more(self, found: Finding, lane: int) -> bool:
        """Return whether ranks may be about to make the call that differs, which the error could name as well."""
        group, rings = found.group, self._rings()
        coming = (
            rank for rank in group.ranks if rank in rings and self._view.local.state_of(rank) not in (*GONE, "left")
        )
        if all(calls_numbered(rings[rank], group.name, (found.number,), lane) for rank in coming):
            return False
        since = self._incomplete_since.setdefault(group.name, time.monotonic())
        return time.monotonic() - since < complete_within_s(len(group.ranks))

    def _rings(self) -> Mapping[int, RingReader]:
        for reader in self._view.local.readers.values():  # kinds of calls may be new in them
            reader.refresh()
        return {**self._view.local.readers, self._view.rank: self._own}

    def _look_at_python(self, waits: bool) -> Iterator[tuple[str, Trouble]]:
        count = self._own.count(0)
        for rank, reader in self._neighbours():
            theirs = reader.count(0)
            if self._compared.get(rank) == count + theirs or not theirs:
                continue
            reader.refresh()
            has_postponed = False
            for name, is_certain in disagreement(self._own, reader):
                if is_certain:
                    found = self._first_difference(name, rank)
                elif time.monotonic() >= self._next_parts_at.get(name, 0.0):
                    self._next_parts_at[name] = time.monotonic() + _PARTS_EVERY_S
                    found = self._different_parts(name)
                else:
                    has_postponed = True
                    continue
                if found is not None and waits and is_certain and self._may_name_more(found, lane=0):
                    has_postponed = True
                elif found is not None:
                    yield name, Trouble.of(found)
            if not has_postponed:  # else there is more to compare, also without another call
                self._compared[rank] = count + theirs

    def _neighbours(self) -> list[tuple[int, RingReader]]:
        """Return the local ranks next to this one, so that all are compared with some other."""
        readers, groups = self._view.local.readers, self._own.groups
        known = len(groups), len(readers)
        if self._next_to_this[0] != known:
            self._next_to_this = known, neighbours(self._view.rank, list(groups.values()), readers)
        return [(rank, readers[rank]) for rank in self._next_to_this[1] if rank in readers]

    def _group(self, name: str) -> RingGroup | None:
        if name in self._broken:
            return None
        return next((one for one in self._own.groups.values() if one.name == name), None)

    def _first_difference(self, name: str, other: int) -> Finding | None:
        """Return in which call this rank and ``other``, whose digests differ, have parted."""
        group, rank = self._group(name), self._view.rank
        return None if group is None else mismatch(group, self._rings(), rank, other)

    def _different_parts(self, name: str) -> Finding | None:
        """Return the split sizes that differ in the latest calls of a group."""
        group = self._group(name)
        return None if group is None else next(iter(mismatches_of(self._view.snapshots(_RECENT_PARTS), group)), None)
