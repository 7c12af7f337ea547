"""The rings of one job, as commands read them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import comm_config
from comm_orchestrator.tools.output import printable
from comm_utils.errors import ArgumentError
from comm_utils.flight_recorder import RingError, RingReader, default_directory, open_ring, rings_in
from comm_utils.flight_recorder.recorder import own_identity
from comm_utils.flight_recorder.snapshot import RankSnapshot
from comm_utils.process_state import process_state

__all__ = ["JobRings", "opened_job", "seconds", "state_in_words", "state_of"]

_ENDS = {0: "dead", 1: "ended", 2: "ended after a failure"}


@dataclass
class JobRings:
    """The rings of a job's last world.

    Attributes:
        folder: where they were looked for.
        readers: by global rank.
        damaged: files that cannot be read, with the reason.
        other_jobs: names of the other jobs in the folder.
    """

    folder: Path
    name: str = ""
    world_size: int = 0
    readers: dict[int, RingReader] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    other_jobs: list[str] = field(default_factory=list)

    @property
    def absent(self) -> list[int]:
        """Return the ranks without a ring."""
        return [rank for rank in range(self.world_size) if rank not in self.readers]


@contextmanager
def opened_job(where: str | None, prefers_running: bool = False) -> Iterator[JobRings]:
    """Open the rings of the newest job in ``where``; damaged ones are named and left out.

    Args:
        where: a folder, with the rings in it or below it, or the name of a job in the directory of the configuration;
            None is that directory.
        prefers_running: a job that runs is chosen before one that has ended.

    Raises:
        ArgumentError: there are none.
    """
    folder = _folder(where)
    by_job: dict[str, list[RingReader]] = defaultdict(list)
    damaged = []
    try:
        for path in rings_in(folder):
            try:
                reader = open_ring(path)
            except RingError as error:
                damaged.append(printable(str(error)))
            except OSError as error:
                damaged.append(printable(f"{path}: {error.strerror}"))
            else:
                by_job[reader.header.job].append(reader)
        if not by_job:
            raise ArgumentError(_nothing_in(folder, damaged))
        names = sorted(by_job, key=lambda name: _order(by_job[name], prefers_running))
        yield _last_world(folder, names, by_job[names[-1]], damaged)
    finally:
        for readers in by_job.values():
            for reader in readers:
                reader.close()


def _folder(where: str | None) -> Path:
    if where is not None and Path(where).is_dir():
        return Path(where)
    configured = comm_config.load_config().flight_recorder.directory
    try:
        base = default_directory() if configured is None else Path(configured)
    except OSError as error:
        raise ArgumentError(f"{error.strerror}; give the folder that has the rings") from error
    if where is None:
        return base
    if "/" not in where and (base / where).is_dir():
        return base / where
    raise ArgumentError(
        f"got {where!r}; expected a folder with rings, or the name of a job in {base}; give the folder, or set "
        "flight_recorder.directory as the job did"
    )


def _nothing_in(folder: Path, damaged: list[str]) -> str:
    if damaged:
        return f"{folder}: no ring can be read: {'; '.join(damaged)}"
    return (
        f"{folder}: no rings; expected files such as JOB/rank-0.ring, which stay after a failure; give the folder that "
        "the job had as flight_recorder.directory, or run it with flight_recorder.keep_clean to keep rings after a "
        "clean end"
    )


def _order(readers: list[RingReader], prefers_running: bool) -> tuple[bool, int]:
    runs = prefers_running and any(state_of(reader) in ("running", "stopped") for reader in readers)
    return runs, max(reader.header.wall_ns for reader in readers)


def _last_world(folder: Path, names: list[str], readers: list[RingReader], damaged: list[str]) -> JobRings:
    """Return the newest ring of each rank of the newest world."""
    readers.sort(key=lambda reader: reader.header.wall_ns)
    size = readers[-1].header.world_size
    newest = {reader.header.rank: reader for reader in readers if reader.header.rank < size}
    return JobRings(folder, names[-1], size, dict(sorted(newest.items())), damaged, names[:-1])


def state_of(reader: RingReader) -> str:
    """Return the state of the process that writes a ring, ``"unknown"`` where it is not visible from here."""
    header = reader.header
    return process_state(*header.process) if header.identity == own_identity() else "unknown"


def state_in_words(snapshot: RankSnapshot) -> str:
    """Return such as ``alive`` or ``ended after a failure``."""
    state = snapshot.header.state
    if snapshot.process == "running":
        return "alive"
    if snapshot.process == "left":
        return f"alive, its world {_ENDS.get(state, 'ended')}"
    if snapshot.process in ("stopped", "replaced", "unknown"):
        return snapshot.process
    return _ENDS.get(state, "dead")


def seconds(value_ns: float) -> str:
    """Return a duration for people: ``12.3 s``, ``4 min 5 s``."""
    value = max(0.0, value_ns / 1e9)
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(math.floor(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
