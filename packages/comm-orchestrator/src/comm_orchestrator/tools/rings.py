"""The rings of one job, as commands read them."""

from __future__ import annotations

import errno
import math
import resource
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import comm_config
from comm_orchestrator.tools.output import printable
from comm_utils.errors import ArgumentError
from comm_utils.flight_recorder import RingError, RingHeader, RingReader, default_directory, open_ring, rings_in
from comm_utils.flight_recorder.recorder import own_identity
from comm_utils.flight_recorder.snapshot import RankSnapshot
from comm_utils.process_state import process_state

__all__ = ["JobRings", "opened_job", "seconds", "state_in_words", "state_of"]

# Descriptors of an open ring, that for its lock included, and those that a command has beside.
_FILES_OF_RING, _OTHER_FILES = 2, 256
_ENDS = {0: "dead", 1: "ended", 2: "ended after a failure"}


@dataclass
class JobRings:
    """The rings of a job's last world.

    Attributes:
        folder: where they were looked for.
        readers: by global rank.
        damaged: files and folders that cannot be read, with the reason.
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
    """Open the rings of the newest job in ``where``; those that cannot be read are named and left out.

    Args:
        where: a folder, with the rings in it or below it, or the name of a job in the directory of the configuration;
            None is that directory.
        prefers_running: a job that runs is chosen before one that has ended.

    Raises:
        ArgumentError: there are none, or more than this process may open.
    """
    folder = _folder(where)
    damaged: list[str] = []
    # Of each ring, what tells its job: descriptors are for the rings of the job that is chosen.
    by_job: dict[str, list[tuple[Path, RingHeader]]] = defaultdict(list)
    for path in rings_in(folder, lambda error: damaged.append(printable(f"{error.filename}: {error.strerror}"))):
        if (reader := _open(path, damaged)) is not None:
            by_job[reader.header.job].append((path, reader.header))
            reader.close()
    names = sorted(by_job, key=lambda name: _order([header for _, header in by_job[name]], prefers_running))
    with ExitStack() as opened:
        readers: dict[int, RingReader] = {}
        size, paths = _last_world(by_job[names[-1]]) if names else (0, {})
        _allow_files(_FILES_OF_RING * len(paths))
        for rank, path in paths.items():
            if (reader := _open(path, damaged)) is not None:
                opened.callback(reader.close)
                readers[rank] = reader
        if not readers:
            raise ArgumentError(_nothing_in(folder, damaged))
        yield JobRings(folder, names[-1], size, readers, damaged, names[:-1])


def _open(path: Path, damaged: list[str]) -> RingReader | None:
    """Return a reader of the ring at ``path``; None where it cannot be read, with the reason in ``damaged``.

    Raises:
        ArgumentError: this process can open no more files, which says nothing about the ring.
    """
    try:
        return open_ring(path)
    except RingError as error:
        damaged.append(printable(str(error)))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            text = f"{path}: {error.strerror}; a ring takes up to {_FILES_OF_RING}: raise the limit with ulimit -n"
            raise ArgumentError(text) from None
        damaged.append(printable(f"{path}: {error.strerror}"))
    return None


def _allow_files(number: int) -> None:
    """Raise the limit of open files of this process, as far as it may, so that it can open so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + _OTHER_FILES
    if wanted > soft != resource.RLIM_INFINITY:
        with suppress(OSError, ValueError):
            wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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


def _order(headers: Sequence[RingHeader], prefers_running: bool) -> tuple[bool, int]:
    runs = prefers_running and any(_state(header) in ("running", "stopped") for header in headers)
    return runs, max(header.wall_ns for header in headers)


def _last_world(rings: Sequence[tuple[Path, RingHeader]]) -> tuple[int, dict[int, Path]]:
    """Return the size of the newest world, and the newest ring of each of its ranks."""
    ordered = sorted(rings, key=lambda ring: ring[1].wall_ns)
    size = ordered[-1][1].world_size
    newest = {header.rank: path for path, header in ordered if header.rank < size}
    return size, dict(sorted(newest.items()))


def state_of(reader: RingReader) -> str:
    """Return the state of the process that writes a ring, ``"unknown"`` where it is not visible from here."""
    return _state(reader.header)


def _state(header: RingHeader) -> str:
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
