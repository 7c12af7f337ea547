"""Waits for collectives that do not raise by themselves where ranks cannot go on.

A wait for NCCL and its like ends without an error when the watch has aborted the communicator.

gloo sometimes does not notice that its connections have ended. A collective of gloo waits in a thread of gloo, first
for what it receives and then until what it sends has left. Where both connections of a ring end at once, that thread
may miss it: with torch 2.13, ``UnboundBuffer::waitSend`` went on until the timeout with no socket of the group left. So
a call waits for its thread in slices. Once the group is broken, a call that still does not end is given up, and the
group stays in memory, as its destructor would wait for the thread.

Messages have a wait of their own (``message_waits.py``): a slice that ends would close the connections.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch.distributed.distributed_c10d as internals

from comm_backend_torch.work import left, wait_and_check
from comm_utils.active import slot
from comm_utils.errors import BrokenGroupError
from comm_utils.rank_processes import PROCESSES, named_ranks
from comm_utils.torch_support.failures import raised_by_handler
from comm_utils.torch_support.gloo_connections import end_connections, keep_in_memory
from comm_utils.torch_support.group_state import GroupState
from comm_utils.watch.trouble import Trouble
from comm_utils.watch.watch import WATCH

__all__ = ["NOTICE_S", "Wait", "how_to_wait", "interrupted", "leave"]

# Libraries that nobody aborts.
_RAISING = frozenset(("fake", "mpi"))
_SLICE = timedelta(milliseconds=250)
#: How long gloo may take to notice that its connections have ended.
NOTICE_S = 0.3

# The interpreter ends.
_is_ending = False

#: Takes a work of c10d, and when its time is over by the monotonic clock; None is the group's timeout.
Wait: TypeAlias = Callable[..., None]


def how_to_wait(state: GroupState, device: str) -> Wait | None:
    """Return how collectives of a group are waited for; None where ``wait()`` of the library does all of it.

    Args:
        device: the type of device of their tensors.
    """
    library = state.libraries[device]
    if library == "gloo":
        return partial(_wait, state)
    return None if library in _RAISING else partial(wait_and_check, state)


def _wait(state: GroupState, work: Any, end: float | None = None) -> None:
    try:
        _wait_to_the_end(state, work, end)
    except KeyboardInterrupt:
        interrupted(state)
        raise


def _wait_to_the_end(state: GroupState, work: Any, end: float | None) -> None:
    broken_at: float | None = None
    while True:
        if _is_ending and _is_daemon_of_program(threading.current_thread()):
            _stay()
        failure: RuntimeError | None = None
        try:
            work.wait(_SLICE if end is None else min(_SLICE, left(end)))
        except RuntimeError as error:  # nothing more here: it would be the context of what a signal handler raises
            failure = error
        if failure is None:
            return
        if raised_by_handler(failure):
            raise failure
        if work.is_completed():
            work.wait()  # raises its own error; it may also have ended well, just after the slice
            return
        if end is not None and time.monotonic() >= end:
            raise failure
        now = time.monotonic()
        if state.broken is None:
            continue
        broken_at = broken_at or now
        if now - broken_at >= NOTICE_S:
            keep_in_memory(state.pg)
            raise RuntimeError("Connection closed by peer")


def interrupted(state: GroupState, by: str = "SIGINT") -> None:
    """End the group, as this rank leaves a call in which the others wait for it."""
    rank = state.ranks[state.rank]
    text = f"{named_ranks([rank], PROCESSES)} was interrupted ({by}) in a call"
    trouble = Trouble(BrokenGroupError, text, (rank,))
    state.fall_into(trouble)
    slot.fast_paths.clear()  # which do not look whether the group is broken
    WATCH.tell(state.name, BrokenGroupError(trouble.text), trouble)
    end_connections(state.pg)


def leave(state: GroupState, work: Any, error: BaseException, is_message: bool = False) -> None:
    """End the group where ``error`` leaves a call under way in which gloo goes on with the tensors of the caller.

    Args:
        work: of the call; None where gloo may have begun it, and there is no handle.
    """
    if work is not None and work.is_completed():
        return
    if state.broken is None:
        interrupted(state, "SIGINT" if isinstance(error, KeyboardInterrupt) else type(error).__name__)
    if work is None or is_message:  # gloo cancels a message whose handle is dropped
        return
    end = time.monotonic() + NOTICE_S
    while not work.is_completed():
        if time.monotonic() >= end:
            keep_in_memory(state.pg)
            return
        time.sleep(0.001)


def _is_daemon_of_program(thread: threading.Thread) -> bool:
    """Return whether Python ends a thread wherever it is; those of this library have ends of their own."""
    return thread.daemon and not thread.name.startswith("comm-")


def _stay() -> None:
    """Never return."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@atexit.register
def _keep_threads_in_waits() -> None:
    """Let daemon threads of the program that wait in gloo stay where they are.

    One that came back while the interpreter ends would be ended by Python within C++, which aborts the process.
    """
    global _is_ending  # there is one interpreter
    _is_ending = True
    if not _waiting_frames():
        return
    for group in list(internals._world.pg_map):
        keep_in_memory(group)  # as its destructor would wait for what these threads wait for
    end = time.monotonic() + 2 * _SLICE.total_seconds()
    while _wait_to_the_end.__code__ in _waiting_frames() and time.monotonic() < end:
        time.sleep(0.01)


def _waiting_frames() -> list[CodeType]:
    """Return, of each daemon thread of the program that waits in gloo, the innermost function of this package."""
    found, threads = [], {one.ident for one in threading.enumerate() if _is_daemon_of_program(one)}
    for thread, top in sys._current_frames().items():
        frame: FrameType | None = top if thread in threads else None
        while frame is not None and not frame.f_globals.get("__name__", "").startswith(__package__ or ""):
            frame = frame.f_back
        if frame is not None and frame.f_globals["__name__"].endswith("waits"):
            found.append(frame.f_code)
    return found
