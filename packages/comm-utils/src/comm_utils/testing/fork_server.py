"""Ranks forked from a process that has already imported what every rank imports (Linux).

A fresh interpreter that imports torch needs about two seconds of a core; a fork of one that has it, a few
milliseconds. A fork is used only where it is equivalent to a fresh interpreter: the server has a single thread, has
called nothing, and has the environment of the rank but for variables that are read later.

Two servers fork the ranks in turn. Each has its own seed of :func:`hash`, so that the order of a set differs between
neighbouring ranks, as it does between fresh interpreters.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import comm_utils
from comm_utils.process_locks import ProcessLock
from comm_utils.testing.environment import RUN_TOKEN, template_environment
from comm_utils.testing.forking import Fork, Forked, Imported, Reap, Reaped

__all__ = ["ForkedProcess", "fork_rank", "interpreter_path", "preload"]

_SERVERS = 2
# Only of a server that hangs: one that ends is seen at once. Others that use the cores make imports take minutes.
_START_TIMEOUT_S = 300.0
_REAP_TIMEOUT_S = 30.0

# What code reads when it is called, not when it is imported.
_READ_LATER = (
    "CCL_",
    "COMM_",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_",
    "I_MPI_",
    "LOCAL_",
    "MASTER_",
    "OMPI_",
    "PMIX_",
    "PMI_",
    "PYTEST_CURRENT_TEST",
    "RANK",
    "SLURM_",
    "TESTS_",
    "TORCHELASTIC_",
    "WORLD_SIZE",
)
_READ_LATER_EXACTLY = (
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it in a runner that compiles
    RUN_TOKEN,
)

_modules: tuple[str, ...] = ()
_environ: dict[str, str] = {}
_servers: list[_Server] = []
_turn = ProcessLock(threading.Lock)


def preload(*modules: str) -> None:
    """Start ranks as forks of a process that has imported ``modules``, where the system can; call it in conftest.py.

    A rank with ``COMM_TESTS_FORK=0`` in the environment or in its ``env`` is a fresh interpreter all the same, and so
    is one whose environment differs in a variable that may be read by an import.

    Args:
        modules: importable names. What they do when imported must leave no thread and no open connection.
    """
    global _modules, _environ  # one setting a process, as the servers are
    with _turn.lock:
        _close_servers()
        _modules = tuple(dict.fromkeys((*_modules, *modules)))
        _environ = template_environment()


def fork_rank(rank: int, environ: Mapping[str, str], fds: tuple[int, int, int, int]) -> ForkedProcess | None:
    """Fork the process of a rank; None where it has to be a fresh interpreter.

    Args:
        rank: which rank.
        environ: its environment.
        fds: descriptors of its connection to the runner, of the file for stacks, of stdout and of stderr.
    """
    if not _modules or os.environ.get("COMM_TESTS_FORK") == "0" or environ.get("COMM_TESTS_FORK") == "0":
        return None
    with _turn.lock:
        if not _have_servers():
            return None
        server = _servers[rank % _SERVERS]
        return server.fork(environ, fds) if server.suits(environ) else None


def interpreter_path() -> list[str]:
    """Return the search path of a rank: the runner's, and where this package is."""
    root = str(Path(comm_utils.__file__).resolve().parent.parent)
    path = [str(entry) for entry in sys.path]
    return path if root in path else [*path, root]


@dataclass
class ForkedProcess:
    """A child of the server, which the runner can watch and kill but not wait for."""

    pid: int
    _pidfd: int
    _server: _Server

    def is_over(self) -> bool:
        """Return whether the process has ended; its id stays its own until :meth:`reap`."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def reap(self, timeout_s: float) -> int:
        """Wait until the process has ended and return its exit code, negative for a signal."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise subprocess.TimeoutExpired(f"rank process {self.pid}", timeout_s)
        os.close(self._pidfd)
        return self._server.reap(self.pid)


class _Server:
    def __init__(self, modules: tuple[str, ...], environ: dict[str, str]) -> None:
        self._modules = modules
        self._environ = environ
        self._imported: Imported | None = None
        self.runner_pid = os.getpid()
        self.alive = True
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        with theirs:
            program = (
                f"import sys; sys.path[:] = {interpreter_path()!r}; from comm_utils.testing.forking import main; "
                f"main({theirs.fileno()}, {self.runner_pid}, {modules!r})"
            )
            self._popen = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=environ,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def suits(self, environ: Mapping[str, str]) -> bool:
        """Return whether a fork is what a fresh interpreter with ``environ`` would be.

        Raises:
            RuntimeError: the server could not import its modules.
        """
        if self._imported is None:
            self._imported = self._await_imports()
        return (
            self._imported.threads == 1
            and _read_at_import(environ) == _read_at_import(self._environ)
            and len(environ.get(RUN_TOKEN, "")) == len(self._environ[RUN_TOKEN])
        )

    def _await_imports(self) -> Imported:
        reply = self._receive(_START_TIMEOUT_S)
        if isinstance(reply, Imported):
            return reply
        self._output.seek(0)
        said = self._output.read().decode(errors="backslashreplace")
        raise RuntimeError(f"preload() cannot import {', '.join(self._modules)}; the fork server wrote:\n{said}")

    def fork(self, environ: Mapping[str, str], fds: tuple[int, int, int, int]) -> ForkedProcess | None:
        request = Fork(dict(environ), interpreter_path(), os.getcwd())
        try:
            self._connection.send_bytes(pickle.dumps(request))
            socket.send_fds(self._socket, [b"f"], list(fds))
        except OSError:
            self.alive = False
            return None
        reply = self._receive(_REAP_TIMEOUT_S)
        if not isinstance(reply, Forked):
            return None
        return ForkedProcess(reply.pid, os.pidfd_open(reply.pid), self)

    def reap(self, pid: int) -> int:
        with _turn.lock:
            with contextlib.suppress(OSError):
                self._connection.send_bytes(pickle.dumps(Reap(pid)))
            reply = self._receive(_REAP_TIMEOUT_S)
        # Where the server has died, the kernel has killed its children.
        return reply.exit_code if isinstance(reply, Reaped) else -signal.SIGKILL

    def _receive(self, timeout_s: float) -> object:
        try:
            if self._connection.poll(timeout_s):
                return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            pass
        self.alive = False
        return None

    def close(self) -> None:
        self.alive = False
        self._connection.close()
        self._socket.close()
        self._output.close()
        if os.getpid() == self.runner_pid:
            self._popen.kill()
            self._popen.wait()


def _have_servers() -> bool:
    if _servers and all(server.alive and server.runner_pid == os.getpid() for server in _servers):
        return True
    # The kernel ends a server with the thread that started it.
    if not hasattr(os, "pidfd_open") or threading.current_thread() is not threading.main_thread():
        return False
    _close_servers()
    _servers.extend(_Server(_modules, _environ) for _ in range(_SERVERS))
    return True


def _read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_READ_LATER) and name not in _READ_LATER_EXACTLY
    }


def _close_servers() -> None:
    while _servers:
        _servers.pop().close()


atexit.register(_close_servers)
