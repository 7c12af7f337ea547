"""The rows of ``commctl top``: what each rank does now, and its rates since the last look."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from comm_orchestrator.rendezvous.records import format_ranks
from comm_orchestrator.tools.rings import JobRings, state_in_words, state_of
from comm_utils import operations
from comm_utils.flight_recorder import Call, RingReader
from comm_utils.flight_recorder.awaited_ranks import awaited_ranks
from comm_utils.flight_recorder.layout import LANES
from comm_utils.flight_recorder.snapshot import RankSnapshot, take_snapshot
from comm_utils.group_names import is_default_name
from comm_utils.sizes import message_size_bytes

__all__ = ["Row", "Sampler", "size_bytes"]

# Of the calls since the last look, the sizes of so many tell those of all.
_SAMPLED = 512
_RECENT = 64


@dataclass(frozen=True)
class Row:
    """One rank.

    Attributes:
        call: that it is in; "" is none.
        since_s: for how long it has been in the call, or in none.
        calls_per_s, bytes_per_s: since the last look; None at the first.
        waits_for: ranks that have a ring and have not begun the call.
    """

    rank: int
    host: str
    pid: int
    state: str
    call: str
    size_bytes: int
    group: str
    caller: str
    since_s: float | None
    calls_per_s: float | None
    bytes_per_s: float | None
    waits_for: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the row for programs."""
        return asdict(self)


def size_bytes(call: Call) -> int:
    """Return the size of a call as nccl-tests defines it; 0 where the operation is unknown."""
    row = operations.find(call.operation)
    if row is None:
        return 0
    if call.sent is not None:
        return max(sum(call.sent), sum(call.received or ())) * _bytes_of(call.dtype)
    part = call.elements * _bytes_of(call.dtype) * (len(call.group.ranks) if row.pattern.uneven else 1)
    return message_size_bytes(call.operation, part, len(call.group.ranks))


def _bytes_of(dtype: str) -> int:
    bits = re.search(r"[0-9]+", dtype[:16])
    return max(1, int(bits[0]) // 8) if bits else 1


class Sampler:
    """Makes rows, with rates since the last time."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int, int], int] = {}
        self._at = 0.0

    def rows(self, job: JobRings) -> list[Row]:
        """Return a row for each rank that has a ring."""
        now = time.monotonic()
        passed_s, self._at = now - self._at, now
        before, self._counts = self._counts, {}
        ranks = {
            rank: take_snapshot(reader, is_local=state_of(reader) != "unknown", recent=_RECENT)
            for rank, reader in job.readers.items()
        }
        awaited = awaited_ranks(_with_last_collectives(job, ranks))
        return [self._row(job, one, awaited.get(rank, ()), before, passed_s) for rank, one in ranks.items()]

    def _row(
        self,
        job: JobRings,
        one: RankSnapshot,
        awaited: Sequence[int],
        before: Mapping[tuple[int, int, int], int],
        passed_s: float,
    ) -> Row:
        waiting = one.waiting_calls()
        call = waiting[0] if waiting else None
        calls_per_s, bytes_per_s = self._rates(job.readers[one.rank], before, passed_s)
        return Row(
            rank=one.rank,
            host=one.header.host,
            pid=one.header.pid,
            state=state_in_words(one),
            call="" if call is None else call.name,
            size_bytes=0 if call is None else size_bytes(call),
            group="" if call is None else _group(call, job.world_size),
            caller="" if call is None else call.caller,
            since_s=_since(one, call),
            calls_per_s=calls_per_s,
            bytes_per_s=bytes_per_s,
            # Of ranks without a ring, nobody knows.
            waits_for=tuple(other for other in awaited if other in job.readers),
        )

    def _rates(
        self, reader: RingReader, before: Mapping[tuple[int, int, int], int], passed_s: float
    ) -> tuple[float | None, float | None]:
        header, made, moved, known = reader.header, 0, 0.0, True
        for lane in range(LANES):
            key = header.pid, header.wall_ns, lane
            count = self._counts[key] = reader.count(lane)
            known &= key in before
            new = count - before.get(key, count)
            if new > 0:
                calls = reader.calls(lane, after=count - new, most=_SAMPLED)
                made += new
                moved += sum(map(size_bytes, calls)) * new / max(1, len(calls))
        return (made / passed_s, moved / passed_s) if known and passed_s > 0 else (None, None)


def _group(call: Call, world_size: int) -> str:
    group = call.group
    if not is_default_name(group.description):
        return group.description
    return "world" if len(group.ranks) == world_size else format_ranks(group.ranks)


def _since(snapshot: RankSnapshot, call: Call | None) -> float | None:
    """Return for how long a rank has been in a call, or in none; None where its clock is another's."""
    if snapshot.process == "unknown":
        return None
    if call is not None:
        return max(0, snapshot.taken_ns - call.begin_ns) / 1e9
    ends = [one.end_ns for one in snapshot.calls if one.end_ns]
    return max(0, snapshot.taken_ns - max(ends)) / 1e9 if ends else None


def _with_last_collectives(job: JobRings, ranks: Mapping[int, RankSnapshot]) -> dict[int, RankSnapshot]:
    """Return ``ranks``, each also with its last collective on every group in which others wait for one."""
    awaited = {
        call.group.name: call.group for one in ranks.values() for call in one.waiting_calls()[:1] if not call.is_message
    }
    found = {}
    for rank, one in ranks.items():
        missing = [name for name, group in awaited.items() if rank in group.ranks and not one.collectives(name)]
        last = [call for name in missing if (call := _last_collective(job.readers[rank], name)) is not None]
        found[rank] = replace(one, calls=(*last, *one.calls)) if last else one
    return found


def _last_collective(reader: RingReader, group: str) -> Call | None:
    calls = (call for lane in range(LANES) for call in reader.backwards(lane))
    return next((call for call in calls if call.group.name == group and not call.is_message), None)
