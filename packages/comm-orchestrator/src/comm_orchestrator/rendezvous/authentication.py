"""Authenticate what the ranks write into the store before their world exists.

A process that can connect to the store can read and set every key in it. Where the ranks share a secret, each record
carries an HMAC (RFC 2104, with SHA-256) over the rendezvous, the key and the text, so that a record of a stranger, of
another rendezvous or under another key is refused. ``docs/setting-up.md`` says what this defends against and what
not.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import hmac
import json
import math
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from comm_config.secret import SECRET_VARIABLE
from comm_utils import json_files
from comm_utils.errors import ArgumentError, LaunchError
from comm_utils.process_state import is_alive

__all__ = [
    "RoomCheck",
    "Seal",
    "can_share_secrets",
    "environment_secret",
    "file_secret",
    "keeps_secrets",
    "remove_secrets",
    "share_secret",
]

_LEAST_CHARACTERS = 16
_MARK = "hmac-sha256:"
_SEALED = re.compile(rf"{_MARK}([0-9a-f]{{64}}) ", re.ASCII)
# The same folder for every rank of the host and the user, so none that a variable of one rank could change.
_PARENTS = (Path("/tmp"), Path("/dev/shm"))
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A rank that waits for rank 0 looks for room so often, and gives up where there was none for so long.
_LOOK_S, _LACKS_S = 1.0, 2.0
_SECRET_BYTES = 32
_APPEARS_S = 2.0
_MOST_FILE_BYTES = 1024
_written: set[Path] = set()
# A forked child that ends must not remove what the ranks of its parent's job still read.
os.register_at_fork(after_in_child=_written.clear)


class _Written(NamedTuple):
    """The content of the file in which the ranks of a host share a secret."""

    pid: int
    pids: str
    secret: bytes

    def encoded(self) -> bytes:
        return json.dumps({"pid": self.pid, "pids": self.pids, "secret": self.secret.hex()}).encode()

    @classmethod
    def decoded(cls, text: bytes) -> _Written | None:
        """Return the content of a file; None where it is another one."""
        try:
            found = json_files.parse(text.decode(), "")
            secret = bytes.fromhex(found["secret"])
            pid, pids = found["pid"], found["pids"]
        except (ValueError, KeyError, TypeError):
            return None
        if len(secret) != _SECRET_BYTES or type(pid) is not int or not isinstance(pids, str):
            return None
        return cls(pid, pids, secret)


class Seal:
    """Sign and check the records of one rendezvous.

    Args:
        secret: shared by the ranks; None: records are neither signed nor checked.
        scope: of the rendezvous; a record of another one is refused.
    """

    def __init__(self, secret: bytes | None = None, scope: str = "") -> None:
        self._secret = secret
        self._scope = scope

    @property
    def signs(self) -> bool:
        """True where the ranks share a secret."""
        return self._secret is not None

    def scoped(self, scope: str) -> Seal:
        """Return a seal with the same secret for another rendezvous."""
        return Seal(self._secret, scope)

    def sign(self, key: str, value: object) -> str:
        """Return ``value`` as JSON for the store, signed where there is a secret."""
        text = json.dumps(value)
        return text if self._secret is None else f"{_MARK}{self._code(self._secret, key, text)} {text}"

    def check(self, key: str, raw: bytes, most_bytes: int) -> Any:
        """Return the value of a record.

        Raises:
            LaunchError: it is longer than ``most_bytes``, not JSON, or not signed with this rank's secret.
        """
        if len(raw) > most_bytes:
            raise LaunchError(f"the record {key!r} has {len(raw)} bytes; expected at most {most_bytes}{_STRANGER}")
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise LaunchError(f"the record {key!r} is not text{_STRANGER}") from None
        sealed = _SEALED.match(text)
        body = text[sealed.end() :] if sealed else text
        if self._secret is not None:
            if sealed is None:
                raise LaunchError(f"the record {key!r} is not signed with the secret of this job{_STRANGER}")
            if not hmac.compare_digest(sealed[1], self._code(self._secret, key, body)):
                raise LaunchError(f"the record {key!r} is signed with another secret{_STRANGER}")
        try:
            return json_files.parse(body, "")
        except ArgumentError:
            raise LaunchError(f"the record {key!r} is not JSON, or not such as a rank writes{_STRANGER}") from None

    def _code(self, secret: bytes, key: str, text: str) -> str:
        message = json.dumps([self._scope, key, text]).encode()
        return hmac.new(secret, message, hashlib.sha256).hexdigest()


_STRANGER = (
    "; another program writes to the store of this job, or its ranks have different secrets: give the job a port of "
    f"its own, and every rank the same {SECRET_VARIABLE}"
)


def environment_secret(environ: Mapping[str, str]) -> bytes | None:
    """Return the secret of ``COMM_JOB_SECRET``, None where it is not set.

    Raises:
        LaunchError: it is too short to be one.
    """
    text = environ.get(SECRET_VARIABLE, "")
    if not text:
        return None
    if len(text) < _LEAST_CHARACTERS:
        raise LaunchError(
            f"init_distributed: environment variable {SECRET_VARIABLE}: got {len(text)} characters; expected at least "
            f"{_LEAST_CHARACTERS} random ones, the same on every rank"
        )
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def share_secret(identity: str, who: str = "init_distributed") -> bytes | None:
    """Return the secret of ``identity`` that this user's processes on this host share; the first of them makes it.

    It stands in a file of mode 0600 in a folder of mode 0700, until :func:`remove_secrets` or the next call after the
    process that made it has ended.

    Args:
        who: the call and its rank, for the message.

    Returns:
        None where this host has no folder for it.

    Raises:
        LaunchError: somebody else has a folder of that name, or there is no room for the file.
    """
    full = []
    for parent in _PARENTS:
        path = parent / f"comm-{os.getuid()}" / _file_name(identity)
        for _ in range(10):  # another rank may remove the folder while it is empty, or be about to write the file
            try:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                if not _is_private(path.parent, stat.S_ISDIR):
                    raise LaunchError(
                        f"{who}: the folder {path.parent}, where the ranks share a secret, is not a private "
                        f"folder of this user (uid {os.getuid()}); remove it, or set {SECRET_VARIABLE} to the same "
                        "random text on every rank"
                    )
                if stat.S_IMODE(path.parent.stat().st_mode) != 0o700:  # the umask took rights of the owner
                    path.parent.chmod(0o700)
                with _locked(path.parent):
                    _remove_stale(path.parent)
                    return _write(path) or _read(path)
            except FileNotFoundError:
                time.sleep(0.01)
            except LaunchError:
                raise
            except OSError as error:
                if error.errno in _NO_ROOM:
                    full.append(f"{parent} ({os.strerror(error.errno)})")
                break
    if full:
        raise LaunchError(f"{who}: {_lack_of_room(full)}")
    return None


class RoomCheck:
    """Looks for room for a secret while rank 0 of this host is not there, which needs that to begin."""

    def __init__(self) -> None:
        self._look_at, self._lacks_since = 0.0, math.inf

    def __call__(self) -> None:
        """Look, unless it was a moment ago.

        Raises:
            LaunchError: there has been no room for a while.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at, full = now + _LOOK_S, _full_folders()
        self._lacks_since = min(self._lacks_since, now) if full else math.inf
        if now - self._lacks_since >= _LACKS_S:
            raise LaunchError(_lack_of_room(full))


def _full_folders() -> list[str]:
    """Return the folders without room for a secret, and the reasons; none where one has room."""
    full = []
    for parent in _PARENTS:
        try:
            with tempfile.TemporaryFile(dir=parent, buffering=0) as file:
                file.write(bytes(_MOST_FILE_BYTES))
            return []
        except OSError as error:
            if error.errno in _NO_ROOM:
                full.append(f"{parent} ({os.strerror(error.errno)})")
    return full


def _lack_of_room(folders: Sequence[str]) -> str:
    return (
        f"the ranks share a secret in a file, for which no room is left in {' and '.join(folders)}; free some space or "
        "inodes there, or raise the limit of file sizes (ulimit -f) where a file is too large, or set "
        f"{SECRET_VARIABLE} to the same random text on every rank"
    )


def can_share_secrets() -> bool:
    """Return True where this host has a folder in which the ranks of a user can share a secret."""
    return any(os.access(parent, os.W_OK) for parent in _PARENTS)


def file_secret(identity: str) -> bytes | None:
    """Return the secret that another process of this user has made for ``identity``, None where there is none.

    Raises:
        LaunchError: this process may not read it.
    """
    end = time.monotonic() + _APPEARS_S
    while True:
        unreadable = ""
        for parent in _PARENTS:
            folder = parent / f"comm-{os.getuid()}"
            try:
                if _is_private(folder, stat.S_ISDIR):
                    return _read(folder / _file_name(identity))
            except OSError as error:
                if error.errno == errno.EACCES:
                    unreadable = str(folder / _file_name(identity))
        if time.monotonic() > end:
            if not unreadable:
                return None
            raise LaunchError(
                f"init_distributed: the ranks share a secret in {unreadable}, which this process may not read though "
                f"it belongs to this user (uid {os.getuid()}); give the folder the mode 0700 and the file 0600, or set "
                f"{SECRET_VARIABLE} to the same random text on every rank"
            )
        time.sleep(0.05)


def keeps_secrets() -> bool:
    """Return True where other ranks need a file that ends with this process."""
    return bool(_written)


def remove_secrets() -> None:
    """Remove the files that this process has made, and the folder where it was the last one."""
    for path in _written:
        with contextlib.suppress(OSError):
            path.unlink()
            with _locked(path.parent):
                path.parent.rmdir()
    _written.clear()


def _file_name(identity: str) -> str:
    # The id of a job comes from the environment, of which Python shows bytes that are no text as surrogates.
    return hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:32]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from adding files and removing them, so that none replaces a stale one that is seen here.

    Raises:
        FileNotFoundError: the folder was removed or replaced, so others lock another one.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not os.path.samestat(os.fstat(descriptor), folder.lstat()):
            raise FileNotFoundError(f"{folder} is another folder now")
        yield
    finally:
        # A child that another thread has just forked has the descriptor, too.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _is_private(path: Path, kind: Any) -> bool:
    found = path.lstat()
    return bool(kind(found.st_mode)) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077


def _write(path: Path) -> bytes | None:
    """Make the file at once with its contents; None where another process was first."""
    secret = secrets.token_bytes(_SECRET_BYTES)
    own = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    namespace = _pid_namespace() if Path("/proc/self/ns/pid").exists() else ""
    content = _Written(os.getpid(), namespace, secret).encoded()
    try:
        _create(own, content)
        try:
            os.link(own, path)
        except FileExistsError:
            raise
        except OSError:  # the file system has no hard links; readers come again while the file is empty
            _create(path, content)
        if not _written:
            atexit.register(remove_secrets)
        _written.add(path)
        return secret
    except FileExistsError:
        return None
    finally:
        own.unlink(missing_ok=True)


def _create(path: Path, content: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(file, 0o600)  # the umask may take rights of the owner
        os.write(file, content)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(file)


def _read(path: Path) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(file, "rb") as opened:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"{path} is not a private file of this user")
        text = opened.read(_MOST_FILE_BYTES)
    if not text:
        raise FileNotFoundError(f"{path} is not written yet")
    written = _Written.decoded(text)
    if written is None:
        raise PermissionError(f"{path} holds no secret")
    return written.secret


def _remove_stale(folder: Path) -> None:
    """Remove the files of processes that were killed."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            with path.open("rb") as opened:
                written = _Written.decoded(opened.read(_MOST_FILE_BYTES))
            # Another container may share the folder, but not the process ids.
            if written and written.pids == _pid_namespace() and not is_alive(written.pid):
                path.unlink()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
