"""The rows of ``commctl top``: what each rank does now, and its rates since the last look."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from comm_orchestrator.rendezvous.records import format_ranks
from comm_orchestrator.tools.rings import JobRings, state_in_words, state_of
from comm_utils import operations
from comm_utils.flight_recorder import Call, RingReader
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
        waits_for: ranks that have not begun the call.
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
    if operations.find(call.operation) is None:
        return 0
    if call.sent is not None:
        return max(sum(call.sent), sum(call.received or ())) * _bytes_of(call.dtype)
    part = call.elements * _bytes_of(call.dtype) * (len(call.group.ranks) if call.is_uneven else 1)
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
        return [self._row(job, ranks, rank, before, passed_s) for rank in ranks]

    def _row(
        self,
        job: JobRings,
        ranks: Mapping[int, RankSnapshot],
        rank: int,
        before: Mapping[tuple[int, int, int], int],
        passed_s: float,
    ) -> Row:
        reader, one = job.readers[rank], ranks[rank]
        waiting = one.waiting_calls()
        call = waiting[0] if waiting else None
        calls_per_s, bytes_per_s = self._rates(reader, before, passed_s)
        return Row(
            rank=rank,
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
            waits_for=() if call is None else _awaited(call, rank, job, ranks),
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


def _awaited(call: Call, rank: int, job: JobRings, ranks: Mapping[int, RankSnapshot]) -> tuple[int, ...]:
    """Return the ranks that have not begun a call; those without a ring are left out."""
    if call.is_message:
        return (call.peer,) if call.peer >= 0 else ()
    return tuple(
        other
        for other in call.group.ranks
        if other != rank and other in ranks and _last_number(job.readers[other], ranks[other], call) < call.in_series
    )


def _last_number(reader: RingReader, snapshot: RankSnapshot, call: Call) -> int:
    """Return the number of a rank's last collective on the group of ``call``."""
    numbers = [one.in_series for one in snapshot.collectives(call.group.name)]
    if numbers:
        return max(numbers)
    # It is not among the last calls.
    for lane in range(LANES):
        for one in reader.backwards(lane):
            if one.group.name == call.group.name and not one.is_message:
                return one.in_series
    return 0
