"""One rank's process, as the runner holds it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from comm_utils.testing.fork_server import fork_rank, interpreter_path
from comm_utils.testing.messages import Call, Leave, Raised, Ready, Returned

__all__ = ["RankProcess", "dump_stacks", "kill_strays"]

_STACKS_WAIT_S = 1.5
_REAP_WAIT_S = 30.0
_LONGEST_BLOCK_S = 1e6
_OUTPUT_LIMIT_BYTES = 16 << 20


class RankProcess:
    """A process in a session of its own, connected by a socket pair; output goes to unnamed files."""

    def __init__(self, rank: int, environ: dict[str, str]) -> None:
        self.rank = rank
        self.reply: Returned | Raised | None = None
        self.connected = True
        self.exit_code: int | None = None
        self.ended_at: float | None = None
        self._reaped = False
        self._ready = False
        self._called = False
        with contextlib.ExitStack() as stack:
            self._stdout = stack.enter_context(_unnamed_file())
            self._stderr = stack.enter_context(_unnamed_file())
            self._stacks = stack.enter_context(_unnamed_file())
            ours, theirs = socket.socketpair()
            stack.enter_context(theirs)
            self.connection = stack.enter_context(Connection(ours.detach()))
            fds = (theirs.fileno(), self._stacks.fileno(), self._stdout.fileno(), self._stderr.fileno())
            self._process = fork_rank(rank, environ, fds) or _FreshProcess(environ, fds)
            stack.callback(self.kill)
            theirs.close()
            self._resources = stack.pop_all()

    def begin(self, call: Call, deadline: float) -> None:
        """Send a call; a rank that cannot take it is left for :meth:`ended` or the deadline to find."""
        self.reply = None
        if self._called:  # what the first call finds there was written while starting
            for file in (self._stdout, self._stderr, self._stacks):
                os.ftruncate(file.fileno(), 0)
        self._called = True
        self._limit_blocking(deadline)
        self._send(call)

    def leave(self) -> None:
        """Ask the rank to end as a program ends."""
        self._send(Leave())

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError):
            self.connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def _limit_blocking(self, deadline: float) -> None:
        # A rank that stops in the middle of a message must not hold the runner beyond its deadline.
        remaining_s = min(max(deadline - time.monotonic(), 0.001), _LONGEST_BLOCK_S)
        timeval = struct.pack("ll", int(remaining_s), int(remaining_s % 1 * 1e6))
        with socket.socket(fileno=os.dup(self.connection.fileno())) as handle:
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)

    def receive(self) -> None:
        """Take one message that has arrived, or notice that the connection is closed."""
        try:
            message = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.connected = False
            return
        if isinstance(message, Ready):
            self._ready = True
        elif isinstance(message, (Returned, Raised)):
            self.reply = message

    def ended(self) -> bool:
        """Return whether the process is over.

        If so, whatever it still said has been received and it has been reaped.
        """
        if self._reaped:
            return True
        # Without reaping, so that its id still names its process group, and nothing else, in kill().
        if not self._process.is_over():
            return False
        with contextlib.suppress(OSError):
            while self.connected and self.connection.poll(0):
                self.receive()
        self.kill()
        return True

    def kill(self) -> None:
        """Kill the process and all in its group, and reap it."""
        if self._reaped:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.exit_code = self._process.reap(_REAP_WAIT_S)
        self.ended_at = time.monotonic()
        self._reaped = True

    @property
    def pid(self) -> int:
        """Return the process id."""
        return int(self._process.pid)

    def close(self) -> None:
        """Kill what is left and close every descriptor."""
        self._resources.close()

    def ask_for_stacks(self) -> bool:
        """Have the rank write its stacks; False where it is over or has not installed its handler yet."""
        if self._reaped or not self._ready:
            return False
        os.kill(self._process.pid, signal.SIGUSR1)
        return True

    @property
    def stacks_size(self) -> int:
        """Bytes of stacks written so far."""
        return os.fstat(self._stacks.fileno()).st_size

    @property
    def stdout(self) -> str:
        """Return what it wrote to stdout since the call began."""
        return _text(self._stdout)

    @property
    def stderr(self) -> str:
        """Return what it wrote to stderr since the call began."""
        return _text(self._stderr)

    @property
    def stacks(self) -> str:
        """The stacks it was asked for."""
        return _text(self._stacks)


def dump_stacks(ranks: Iterable[RankProcess]) -> None:
    """Have all these ranks write their stacks, and wait (at most 1.5 s) until they have."""
    asked = [rank for rank in ranks if rank.ask_for_stacks()]
    give_up = time.monotonic() + _STACKS_WAIT_S
    sizes: list[int] = []
    while asked and time.monotonic() < give_up:
        time.sleep(0.05)
        before, sizes = sizes, [rank.stacks_size for rank in asked]
        if all(sizes) and sizes == before:
            return


def kill_strays(token: str) -> None:
    """Kill processes that left a rank's session, found by the variable they inherited (Linux)."""
    marker = token.encode()
    for _ in range(20):
        found = False
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(entry.name) != os.getpid() and marker in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.01)


class _FreshProcess:
    """A new interpreter."""

    def __init__(self, environ: dict[str, str], fds: tuple[int, int, int, int]) -> None:
        connection_fd, stacks_fd, stdout_fd, stderr_fd = fds
        # The kernel's signal comes when the starting thread ends, so it serves only where that is the main thread.
        die_by_signal = threading.current_thread() is threading.main_thread()
        # The search path comes first, so that the rank never looks anywhere that the runner would not.
        program = (
            f"import sys; sys.path[:] = {interpreter_path()!r}; from comm_utils.testing.worker import main; "
            f"main({connection_fd}, {stacks_fd}, {os.getpid()}, {die_by_signal})"
        )
        self._popen = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=stdout_fd,
            stderr=stderr_fd,
            env=environ,
            pass_fds=(connection_fd, stacks_fd),
            start_new_session=True,
        )
        self.pid = self._popen.pid

    def is_over(self) -> bool:
        """Return whether the process has ended; its id stays its own until :meth:`reap`."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def reap(self, timeout_s: float) -> int:
        """Wait until the process has ended and return its exit code, negative for a signal."""
        return self._popen.wait(timeout_s)


def _unnamed_file() -> IO[bytes]:
    file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the other resources of the rank
    # Writers append wherever the end is, also after the file was emptied for the next call.
    fcntl.fcntl(file.fileno(), fcntl.F_SETFL, fcntl.fcntl(file.fileno(), fcntl.F_GETFL) | os.O_APPEND)
    return file


def _text(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    start = max(0, size - _OUTPUT_LIMIT_BYTES)
    return os.pread(file.fileno(), size - start, start).decode("utf-8", errors="replace")
