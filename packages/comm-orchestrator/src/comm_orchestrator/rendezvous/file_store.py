"""The store in a file, in which the ranks of a job meet without opening a port.

A process that can write the file can set every key, and torch's ``FileStore`` takes a file of any owner and makes one
that all can read. The file is therefore checked, and made first, by this module.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import stat
import struct
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

from torch.distributed import FileStore

from comm_utils.errors import LaunchError
from comm_utils.launch import LaunchInfo

__all__ = ["check_private", "own_file", "store_of_job"]

_PREFIX = "rendezvous-"
_PARENTS = (Path("/tmp"), Path("/dev/shm"))
_REMEDY = (
    "let the ranks meet in a folder of this user alone (mkdir -m 700), or, where all of them run on one host, set "
    "init_method='file://', which makes one"
)
# Where several processes come and go at once, one of them may find that a file was replaced.
_ATTEMPTS = 100
_LENGTH = struct.Struct("=I")


class _Held:
    """The locks that this process holds until it ends, by path: while any process has it, the file is in use."""

    locks: ClassVar[dict[Path, int]] = {}


def check_private(path: Path) -> None:
    """Refuse a file that another user could write or replace; make it with the mode 0600 where there is none.

    Raises:
        LaunchError: its folder is missing or open to all, or the file is a link, another user's, one that others may
            write or none of a store; says which, and the remedy.
    """
    folder = path.parent
    try:
        found = folder.stat()
    except OSError as error:
        raise _refused(path, f"its folder {folder} cannot be used ({error.strerror})") from None
    if not stat.S_ISDIR(found.st_mode):
        raise _refused(path, f"{folder} is no folder")
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise _refused(path, f"every user may replace files in its folder {folder} (mode {_mode(found.st_mode)})")
    with contextlib.suppress(FileExistsError, PermissionError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    try:
        found = path.lstat()
    except OSError as error:
        raise _refused(path, f"the file cannot be made ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode):
        raise _refused(path, "it is a link, or no file at all")
    if found.st_uid != os.getuid():
        raise _refused(path, f"the file belongs to another user (uid {found.st_uid}; this is uid {os.getuid()})")
    if found.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        raise _refused(path, f"other users may write the file (mode {_mode(found.st_mode)})")
    if not _holds_store(path):
        raise LaunchError(
            f"init_distributed: init_method: the ranks cannot meet in the file {path}: it holds something else than "
            "torch's FileStore writes, or the part that a killed process wrote; remove it, or name another file"
        )


def _holds_store(path: Path) -> bool:
    """Return whether torch can read the file; it would wait for the rest of an entry for ever, and hold on to Python.

    Raises:
        LaunchError: the file cannot be read or locked.

    Source: torch/csrc/distributed/c10d/FileStore.cpp (an entry is a key and a value, and each follows its length).
    """
    texts = 0
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # as each rank does while it writes
            size = os.fstat(file.fileno()).st_size
            while file.tell() < size:
                length = file.read(_LENGTH.size)
                if len(length) < _LENGTH.size or _LENGTH.unpack(length)[0] > size - file.tell():
                    return False
                file.seek(_LENGTH.unpack(length)[0], os.SEEK_CUR)
                texts += 1
    except OSError as error:
        raise _refused(path, f"the file cannot be read or locked ({error.strerror})") from None
    return texts % 2 == 0


def _refused(path: Path, why: str) -> LaunchError:
    return LaunchError(f"init_distributed: init_method: the ranks cannot meet in the file {path}: {why}; {_REMEDY}")


def _mode(mode: int) -> str:
    return f"{stat.S_IMODE(mode):04o}"


def store_of_job(launch: LaunchInfo, environ: Mapping[str, str], limit: timedelta) -> tuple[FileStore, Path]:
    """Return a store in a file that the ranks of this job find by its id, in a folder with the mode 0700.

    Raises:
        LaunchError: the ranks run on several hosts, the job has nothing by which they find each other, or there is no
            folder that is private.
    """
    path = own_file(launch, environ)
    _hold(path)
    store = FileStore(str(path))  # without a number of ranks, at whose end torch would remove it
    store.set_timeout(limit)
    return store, path


def own_file(launch: LaunchInfo, environ: Mapping[str, str]) -> Path:
    """Return the file of :func:`store_of_job`; its folder is there.

    Raises:
        LaunchError: as there.
    """
    if launch.local_world_size not in (None, launch.world_size):
        raise LaunchError(
            f"init_distributed: init_method: got 'file://', and {launch.world_size} ranks, of which "
            f"{launch.local_world_size} run on this host; name a file that all hosts share ('file:///path'), or leave "
            "init_method out"
        )
    if launch.job_id is None and launch.master_port is None:
        raise LaunchError(
            f"init_distributed: init_method: got 'file://', and {launch.launcher} gave this job of {launch.world_size} "
            "ranks no id by which they find each other; set MASTER_PORT to a number of its own, or name the file "
            "('file:///path')"
        )
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    identity = f"{launch.job_id} {launch.master_addr} {launch.master_port} {attempt}"
    name = hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:32]
    return _folder(environ) / f"{_PREFIX}{name}"


def _folder(environ: Mapping[str, str]) -> Path:
    """Make the folder, in that of the user's session where there is one, else in that of temporary files."""
    for parent in (*_session(environ), *_PARENTS):
        folder = parent / f"comm-{os.getuid()}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
        except OSError:
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return folder
        raise LaunchError(
            f"init_distributed: init_method: got 'file://', and {folder}, where the ranks would meet, is not a private "
            f"folder of this user (uid {os.getuid()}); remove it, or name a file ('file:///path')"
        )
    raise LaunchError(
        "init_distributed: init_method: got 'file://', and this host has no folder for temporary files; name a file "
        "('file:///path')"
    )


def _session(environ: Mapping[str, str]) -> list[Path]:
    folder = environ.get("XDG_RUNTIME_DIR", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(folder) and os.stat(folder).st_uid == os.getuid():  # not that of a user who called sudo
            return [Path(folder)]
    return []


def _hold(path: Path) -> None:
    """Share a lock on the file's neighbour until this process ends; remove what killed processes left."""
    if path in _Held.locks:
        return
    for _ in range(_ATTEMPTS):
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _remove_unused(path.parent)
            lock = os.open(_lock_of(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # another process has just removed the folder, which was empty
        fcntl.flock(lock, fcntl.LOCK_SH)
        if _is_at(lock, _lock_of(path)):
            break
        os.close(lock)
    else:
        raise LaunchError(f"init_distributed: init_method: the lock of {path} is removed again and again")
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    if not _Held.locks:
        atexit.register(_release, os.getpid())
    _Held.locks[path] = lock


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether ``path`` still names this file: who removes it has the lock for itself alone."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False


def _remove_unused(folder: Path) -> None:
    """Remove the files that no process holds: those of processes that were killed."""
    for lock_path in folder.glob(f"{_PREFIX}*.lock"):
        with contextlib.suppress(OSError):
            lock = os.open(lock_path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _remove(lock_path, lock)
            finally:
                os.close(lock)


def _remove(lock_path: Path, lock: int) -> None:
    """Remove the file and its lock where no other process holds it.

    Raises:
        OSError: another one does.
    """
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if _is_at(lock, lock_path):
        lock_path.with_suffix("").unlink(missing_ok=True)
        lock_path.unlink()


def _release(pid: int) -> None:
    """Leave all files; the last process removes them, and the folder with them."""
    if pid != os.getpid():  # a forked child has the locks of its parent
        return
    for path, lock in _Held.locks.items():
        with contextlib.suppress(OSError):
            _remove(_lock_of(path), lock)
        with contextlib.suppress(OSError):
            path.parent.rmdir()
        os.close(lock)
    _Held.locks.clear()
