"""The folders in which rings lie: one for each job, with one file for each rank of this host."""

from __future__ import annotations

import errno
import math
import mmap
import os
import re
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from comm_utils.flight_recorder.layout import HEADER, HEADER_BYTES, MAGIC, WORDS
from comm_utils.flight_recorder.ring_locks import is_at, lock_as_owner, lock_as_reader
from comm_utils.process_state import GONE, process_state
from comm_utils.regular_file import open_regular

__all__ = [
    "RING_SUFFIX",
    "RingFile",
    "create_folder",
    "create_ring",
    "default_directory",
    "prune",
    "remove_ring",
    "remove_rings_of",
    "rings_in",
]

RING_SUFFIX = ".ring"
_JOB = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_JOB = 80
_WORD = struct.Struct("<Q")
# The watch looks four times a second at least, unless its process is stopped.
_RECENT_S = 60.0
# So often a process that starts makes its folder again.
_MOST_REMOVED = 100
# What ended jobs may keep of the file system: containers often have 64 MiB of shared memory, which torch needs, too.
_KEPT_SHARE = 1 / 8


def default_directory() -> Path:
    """Return the folder that has the folders of jobs where none is configured.

    Raises:
        OSError: no folder of this machine can be written.
    """
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return base / f"comm-flight-{os.getuid()}"


def create_folder(directory: Path, job: str) -> tuple[Path, bool]:
    """Create the folder of ``job`` for this user alone; return it, and whether it is new.

    Raises:
        OSError: it cannot be created, or belongs to another user, or others may enter it; or the default directory,
            which anybody could have made, does.
    """
    folder = directory / (_JOB.sub("-", job)[:_LONGEST_JOB].strip(".") or "job")
    removed = 0
    while True:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_default(directory):
                _check_private(directory)
            is_new = False
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                is_new = True
            _check_private(folder)
            return folder, is_new
        except (FileExistsError, FileNotFoundError):  # another process, which had no room for a ring, has removed it
            removed += 1
            if removed > _MOST_REMOVED:
                raise


def _is_default(directory: Path) -> bool:
    with suppress(OSError):
        return directory == default_directory()
    return False


def _check_private(folder: Path) -> None:
    """Raise ``PermissionError`` unless it is a folder, and no link, that this user alone may enter."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "not a folder of this user alone", str(folder))


class RingFile(NamedTuple):
    """The file of a ring that a process has created.

    Attributes:
        descriptor: of its content.
        lock: a descriptor that locks it for its process until it is closed; -1 where the file system has no locks.
    """

    path: Path
    descriptor: int
    lock: int


def create_ring(folder: Path, rank: int, size_bytes: int) -> RingFile:
    """Create the file of ``rank`` with so many zeros, for this user alone, and lock it for this process.

    Raises:
        OSError: it cannot be created, or there is no room for it.
    """
    path, lock, descriptor = None, -1, -1
    try:
        path, lock = _create_locked(folder, rank)
        # Not the same description of the file: a mapping, which forked children inherit, would keep the lock.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        # Reserved: a page that the file system has no room for would end the process when it is first written.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size_bytes)
        else:
            os.ftruncate(descriptor, size_bytes)
        return RingFile(path, descriptor, lock)
    except BaseException:  # also of a handler of signals
        if path is None:
            _remove_empty(folder)
        else:
            remove_ring(path)
        for one in (descriptor, lock):
            if one >= 0:
                os.close(one)
        raise


def _create_locked(folder: Path, rank: int) -> tuple[Path, int]:
    """Create a file of ``rank`` that no other process removes; return its path and the descriptor of its lock."""
    path, attempt, removed = folder / f"rank-{rank}{RING_SUFFIX}", 0, 0
    while True:
        try:
            lock = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:  # of an earlier world of this job
            attempt += 1
            path = folder / f"rank-{rank}.{attempt}{RING_SUFFIX}"
            continue
        except FileNotFoundError:  # another process has removed the folder, which was empty
            removed += 1
            if removed > _MOST_REMOVED:
                raise
            create_folder(folder.parent, folder.name)
            continue
        try:
            locked = lock_as_owner(lock)
            if locked and is_at(lock, path):
                return path, lock
            if locked is False and is_at(lock, path):  # a process that prunes looks at it, and may stop while it does
                remove_ring(path)
                attempt += 1
                path = folder / f"rank-{rank}.{attempt}{RING_SUFFIX}"
        except BaseException:  # of a handler of signals
            if is_at(lock, path):
                remove_ring(path)
            os.close(lock)
            raise
        os.close(lock)
        if locked is None:
            return path, -1


def remove_ring(path: Path) -> None:
    """Remove a ring, and the folder of its job if it is the last."""
    with suppress(OSError):
        path.unlink()
    _remove_empty(path.parent)


def _remove_empty(folder: Path) -> None:
    """Remove the folder of a job, and the default directory if that was its last, unless something is in them."""
    with suppress(OSError):
        folder.rmdir()
        if _is_default(folder.parent):
            folder.parent.rmdir()


def rings_in(folder: Path, on_error: Callable[[OSError], None] | None = None) -> list[Path]:
    """Return the rings in a folder, or in the folders below it, by name.

    Args:
        on_error: called for each folder that is there and cannot be listed; None leaves such folders out.
    """

    def failed(error: OSError) -> None:
        if on_error is not None and not isinstance(error, FileNotFoundError):
            on_error(error)

    walked = os.walk(folder, onerror=failed)
    found = [Path(where, name) for where, _, names in walked for name in names if name.endswith(RING_SUFFIX)]
    return sorted(found, key=lambda path: (str(path.parent), len(path.name), path.name))


def prune(directory: Path, keep: int, identity: str) -> None:
    """Remove the folders of jobs that have ended, but for the ``keep`` newest.

    Of these, all but the newest go where they take more than an eighth of the file system. Folders of the default
    directory in which a process has ended before it created a ring go as well.

    Args:
        identity: in the rings of processes that this one would see if they lived.
    """
    ended = []
    with suppress(OSError):
        for folder in directory.iterdir():
            with suppress(OSError):
                found = os.lstat(folder)
                rings = list(folder.glob(f"*{RING_SUFFIX}"))
                # Those of a configured directory may be the user's.
                if not rings and abs(time.time() - found.st_mtime) >= _RECENT_S and _is_default(directory):
                    folder.rmdir()
                if stat.S_ISDIR(found.st_mode) and rings and not any(_is_in_use(ring, identity) for ring in rings):
                    ended.append((found.st_mtime, sum(ring.stat().st_size for ring in rings), rings))
    ended.sort(key=lambda one: one[0], reverse=True)
    kept_bytes, most_bytes = 0, _most_kept_bytes(directory)
    for place, (_, taken_bytes, rings) in enumerate(ended):
        kept_bytes += taken_bytes
        if place >= keep or (place > 0 and kept_bytes > most_bytes):
            for ring in rings:
                _remove_unlocked(ring)


def _most_kept_bytes(directory: Path) -> float:
    with suppress(OSError):
        found = os.statvfs(directory)
        return found.f_blocks * found.f_frsize * _KEPT_SHARE
    return math.inf


def _remove_unlocked(ring: Path) -> None:
    """Remove a ring, unless a process has made it its own meanwhile."""
    with suppress(OSError), _opened(ring) as descriptor:
        if lock_as_reader(descriptor) is not False and is_at(descriptor, ring):
            remove_ring(ring)


def remove_rings_of(pids: Collection[int], identity: str) -> None:
    """Remove the rings that processes with these ids, which have ended, have left in the default folder.

    Args:
        identity: in the rings of these processes; one of another container, which may live, may have such a pid, too.
    """
    with suppress(OSError):
        for ring in rings_in(default_directory()):
            with suppress(OSError):
                if _writer(ring).pid in pids and _has(ring, identity) and not _is_in_use(ring, identity):
                    _remove_unlocked(ring)


def _is_in_use(ring: Path, identity: str) -> bool:
    """Return whether the process that wrote a ring lives, and its world, as far as this host can tell.

    A process locks its ring until its world ends. Where the file system has no locks, a process of another container or
    host cannot be seen, but its watch looks around all the time.
    """
    with _opened(ring) as descriptor:
        locked, written_s = lock_as_reader(descriptor), os.fstat(descriptor).st_mtime
    if locked is False:
        return True
    writer = _writer(ring)
    if writer.pid <= 0:  # it may be about to be written
        return locked is None and abs(time.time() - written_s) < _RECENT_S
    if locked and writer.has_ended_world:
        return False
    state = process_state(writer.pid, writer.started, writer.image)
    # A lock that nobody has says more than a process that cannot be looked at, as without /proc.
    if state not in GONE and not (locked and state == "unknown"):
        return True
    return abs(time.time() - writer.looked_s) < _RECENT_S and not _has(ring, identity)


@contextmanager
def _opened(ring: Path) -> Iterator[int]:
    descriptor = open_regular(ring)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _has(ring: Path, identity: str) -> bool:
    with open(open_regular(ring), "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        return memory.find(identity.encode()) >= 0


class _Writer(NamedTuple):
    """The process of a ring; all is 0 where the file does not say.

    Attributes:
        looked_s: when its watch last looked, as a time of day in seconds.
        has_ended_world: for which the ring was; the process may live.
    """

    pid: int = 0
    started: int = 0
    image: int = 0
    looked_s: float = 0.0
    has_ended_world: bool = False


def _writer(ring: Path) -> _Writer:
    """Return the process of a ring.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    with open(open_regular(ring), "rb") as file:
        head = file.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES or not head.startswith(MAGIC):
        return _Writer()
    _, _, _, _, pid, image, started, wall_ns, monotonic_ns, *_ = HEADER.unpack_from(head)
    (looked_ns,) = _WORD.unpack_from(head, WORDS["looked_at"])
    (state,) = _WORD.unpack_from(head, WORDS["state"])
    looked_s = (wall_ns + looked_ns - monotonic_ns) / 1e9 if looked_ns else 0.0
    return _Writer(pid, started, image, looked_s, state in (1, 2))
