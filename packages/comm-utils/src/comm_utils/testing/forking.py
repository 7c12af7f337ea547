"""The program of a fork server: import, then fork a rank for each request of the runner."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import socket
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection

from comm_utils.testing.environment import RUN_TOKEN
from comm_utils.testing.worker import die_with_parent
from comm_utils.testing.worker import main as run_rank

__all__ = ["Fork", "Forked", "Imported", "Reap", "Reaped", "main"]

_DESCRIPTORS = 4


@dataclass(frozen=True)
class Imported:
    """Server to runner: the modules are imported, and the process has this many threads."""

    threads: int


@dataclass(frozen=True)
class Fork:
    """Runner to server: fork a rank; the descriptors of its connection, stacks, stdout and stderr follow."""

    environ: dict[str, str]
    path: list[str]
    folder: str


@dataclass(frozen=True)
class Forked:
    """Server to runner: the rank's process id."""

    pid: int


@dataclass(frozen=True)
class Reap:
    """Runner to server: wait for this child, which has ended."""

    pid: int


@dataclass(frozen=True)
class Reaped:
    """Server to runner: the exit code, negative for a signal."""

    exit_code: int


def main(control_fd: int, runner_pid: int, modules: tuple[str, ...]) -> None:
    """Import ``modules``, then serve requests until the runner closes the connection.

    Args:
        control_fd: inherited descriptor of the connection to the runner.
        runner_pid: the runner's process id.
        modules: what to import first.
    """
    os.set_inheritable(control_fd, False)
    if not die_with_parent(runner_pid):
        return
    # What modules make stays; to look for garbage in it takes a seventh of the time of imports.
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # so that collections in the ranks do not copy every page
    found = _serve(control_fd)
    if found is not None:
        request, fds = found
        connection_fd, stacks_fd = _become_rank(request, fds)
        code = 0
        try:
            run_rank(connection_fd, stacks_fd, os.getppid(), die_by_signal=True)
        except SystemExit as error:
            code = int(error.code or 0)
        _leave(code)


def _leave(code: int) -> None:
    """End as multiprocessing's children do: to take torch apart would need half a second of a core, and its pages."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _serve(control_fd: int) -> tuple[Fork, list[int]] | None:
    """Return in each forked child with what it is to be, and in the server with None when the runner has left."""
    with socket.socket(fileno=control_fd) as control, Connection(os.dup(control_fd)) as connection:
        connection.send_bytes(pickle.dumps(Imported(len(os.listdir("/proc/self/task")))))
        while True:
            try:
                request = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                return None
            if isinstance(request, Reap):
                _, status = os.waitpid(request.pid, 0)
                connection.send_bytes(pickle.dumps(Reaped(os.waitstatus_to_exitcode(status))))
                continue
            _, fds, _, _ = socket.recv_fds(control, 1, _DESCRIPTORS)
            pid = os.fork()
            if pid == 0:
                return request, fds
            for fd in fds:
                os.close(fd)
            connection.send_bytes(pickle.dumps(Forked(pid)))


def _become_rank(request: Fork, fds: list[int]) -> tuple[int, int]:
    os.setsid()
    connection_fd, stacks_fd, stdout_fd, stderr_fd = fds
    for fd, standard in ((stdout_fd, 1), (stderr_fd, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    _show_token(request.environ[RUN_TOKEN])
    os.environ.clear()
    os.environ.update(request.environ)
    sys.path[:] = request.path
    os.chdir(request.folder)
    random = sys.modules.get("numpy.random")
    if random is not None:
        # Python's own generator does this by itself.
        random.seed()
    return connection_fd, stacks_fd


def _show_token(token: str) -> None:
    """Put the run's token where ``/proc/PID/environ`` shows it, over one of the same length.

    Other processes see the memory in which the environment was at the start, whatever is changed later.
    """
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address = libc.getenv(RUN_TOKEN.encode())
    if address and len(ctypes.string_at(address)) == len(token):
        with contextlib.suppress(ValueError):
            ctypes.memmove(address, token.encode("ascii"), len(token))
