"""The state of all ranks of a job, read from their rings at one time."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace

from comm_orchestrator.tools.rings import JobRings, state_of
from comm_utils.flight_recorder import RingHeader, RingReader
from comm_utils.flight_recorder.snapshot import RankSnapshot, take_snapshot
from comm_utils.host_identity import host_identity

__all__ = ["Evidence", "gather"]

# Calls of all ranks that are compared; what is more takes minutes.
_MOST_CALLS = 1 << 17
_FEWEST_CALLS = 1024
# A process that cannot be seen from here, nor holds the lock of its ring, counts as ended after so long without a sign.
_SILENT_NS = 30 * 10**9


@dataclass(frozen=True)
class Evidence:
    """The state of all ranks of a job.

    Attributes:
        ranks: by global rank; times of one that has ended are seen from the last sign of any rank.
        last_sign_ns: when each rank gave its last sign, in nanoseconds since 1970.
        is_live: a rank of the job communicates still.
        now_ns: when the state is that of; of a job that has ended, when it gave its last sign.
        absent: ranks without a ring.
    """

    ranks: dict[int, RankSnapshot]
    last_sign_ns: dict[int, int]
    is_live: bool
    now_ns: int
    absent: tuple[int, ...] = ()

    def since(self, rank: int, at_ns: int) -> int:
        """Return the nanoseconds that have passed since a time by the clock of a rank's ring."""
        return self.ranks[rank].taken_ns - at_ns


def gather(job: JobRings) -> Evidence:
    """Read the rings of a job."""
    wall_ns, monotonic_ns = time.time_ns(), time.perf_counter_ns()
    recent = max(_FEWEST_CALLS, _MOST_CALLS // max(1, len(job.readers)))
    ranks, signs, now = {}, {}, {}
    for rank, reader in job.readers.items():
        one = take_snapshot(reader, is_local=state_of(reader) != "unknown", recent=recent)
        now[rank] = _now(one.header, wall_ns, monotonic_ns)
        signs[rank] = _last_sign(reader, one, now[rank])
        if one.process == "unknown" and reader.is_locked():
            one = replace(one, process="running")
        elif one.process == "unknown" and now[rank] - signs[rank] > _SILENT_NS:
            one = replace(one, process="ended")
        ranks[rank] = one
    is_live = not all(one.is_gone for one in ranks.values())
    now_ns = wall_ns if is_live else max(signs.values())
    for rank, one in ranks.items():
        since_opening_ns = (now[rank] if is_live else now_ns) - one.header.wall_ns
        ranks[rank] = replace(one, taken_ns=one.header.monotonic_ns + since_opening_ns)
    return Evidence(ranks, signs, is_live, now_ns, tuple(job.absent))


def _now(header: RingHeader, wall_ns: int, monotonic_ns: int) -> int:
    """Return the present time of day by the clock of a ring, as it was set when the ring was opened.

    The time of day may have been set since; on the host of the ring, the monotonic clock tells what has passed.
    """
    with suppress(OSError):
        if header.identity.startswith(host_identity()):
            return header.wall_ns + monotonic_ns - header.monotonic_ns
    return wall_ns


def _last_sign(reader: RingReader, snapshot: RankSnapshot, now_ns: int) -> int:
    """Return when a rank did anything that its ring shows, in nanoseconds since 1970."""
    header = snapshot.header
    latest = header.monotonic_ns + max(0, now_ns - header.wall_ns)  # later ones are damaged
    times = [reader.word("looked_at"), *(failure.at_ns for failure in snapshot.failures)]
    times += [time for call in snapshot.calls[-64:] for time in (call.begin_ns, call.end_ns)]
    times += [] if snapshot.stack is None else [snapshot.stack.at_ns]
    last = max((one for one in times if header.monotonic_ns <= one <= latest), default=header.monotonic_ns)
    return header.wall_ns + last - header.monotonic_ns
