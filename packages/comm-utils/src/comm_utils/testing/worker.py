"""The program that each rank runs: wait for a call, run the target, report, repeat."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import pickle
import runpy
import select
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from comm_utils.testing.load import load_function
from comm_utils.testing.machine import follow
from comm_utils.testing.messages import Call, Raised, Ready, Returned, TargetRef

__all__ = ["die_with_parent", "main"]

_PR_SET_PDEATHSIG = 1
_open_connections: list[Connection] = []


def main(connection_fd: int, stacks_fd: int, parent_pid: int, die_by_signal: bool) -> None:
    """Serve calls until the runner says to leave.

    Args:
        connection_fd: inherited descriptor of the connection to the runner.
        stacks_fd: inherited descriptor to which SIGUSR1 writes the stacks of all threads.
        parent_pid: the runner's process id.
        die_by_signal: ask the kernel for SIGKILL when the runner's thread that started this process ends.
    """
    for fd in (connection_fd, stacks_fd):
        os.set_inheritable(fd, False)
    connection = Connection(connection_fd)
    # Kept until the process is over: its closing tells the runner so.
    _open_connections.append(connection)
    if not (die_by_signal and die_with_parent(parent_pid)):
        threading.Thread(target=_watch, args=(connection_fd,), name="runner-watch", daemon=True).start()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks_fd, all_threads=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A rank may be killed at any moment: what it printed must be out by then.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    _send(connection, Ready())
    sys.exit(_serve(connection))


def _serve(connection: Connection) -> int:
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return 1
        if not isinstance(message, Call):
            return 0
        started = time.perf_counter()
        exit_code = 0
        reply: Returned | Raised
        follow(message.patience)
        try:
            payload = _run(message)
            reply = Returned(payload, time.perf_counter() - started)
        except BaseException as error:
            reply = _raised(error, time.perf_counter() - started)
            exit_code = _exit_code(error)
        _send(connection, reply)
        if message.last:
            return exit_code


def _run(call: Call) -> bytes:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    if call.target.is_script:
        args, kwargs = pickle.loads(call.payload)
        _run_script(call.target, args)
        return pickle.dumps(None)
    function = load_function(call.target)
    args, kwargs = pickle.loads(call.payload)  # after the load: they may be instances of the target module's classes
    value = function(*args, **kwargs)
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"{call.target} returned a {type(value).__qualname__} that cannot be pickled "
            f"({type(error).__name__}: {error}); return plain data or tensors"
        ) from None


def _run_script(target: TargetRef, args: tuple[Any, ...]) -> None:
    assert target.file is not None
    sys.argv = [target.file, *map(str, args)]
    sys.path.insert(0, os.path.dirname(target.file))
    try:
        runpy.run_path(target.file, run_name="__main__")
    except SystemExit as error:
        if _exit_code(error) != 0:
            raise


def _exit_code(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _raised(error: BaseException, duration_s: float) -> Raised:
    pickled = None
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
    try:
        message = str(error)
    except Exception as broken:
        message = f"<str() of it raised {type(broken).__name__}>"
    text = "".join(traceback.format_exception(type(error), error, _without_runner(error.__traceback__)))
    return Raised(type(error).__qualname__, message, text, pickled, duration_s)


def _without_runner(trace: TracebackType | None) -> TracebackType | None:
    mine = (__file__, runpy.__file__)
    found = trace
    while found is not None and (
        found.tb_frame.f_code.co_filename in mine or found.tb_frame.f_code.co_filename.startswith("<frozen")
    ):
        found = found.tb_next
    return found or trace


def _send(connection: Connection, message: object) -> None:
    # The runner may have gone; then there is nobody to tell.
    with contextlib.suppress(ConnectionError):
        connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def die_with_parent(parent_pid: int) -> bool:
    """Ask the kernel for SIGKILL when the thread that started this process ends; return whether it agreed."""
    try:
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            return False
    except (ImportError, OSError, AttributeError):
        return False
    if os.getppid() != parent_pid:  # it died before the request was in place
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def _watch(connection_fd: int) -> None:
    """Kill this rank's whole process group once the runner's end of the connection is closed."""
    poll = select.poll()
    poll.register(connection_fd, 0)  # no event asked for: hang-ups are always reported
    poll.poll()
    os.killpg(0, signal.SIGKILL)
