"""Threads that can be left behind, and whose starts fail, and never hang, where there can be no more of them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from comm_utils.weak_collections import members_of

__all__ = ["CONNECTING", "abandoned", "is_still_connecting", "left_behind", "start", "with_limit"]

#: The name of a thread in which a library connects the members of a group; the library follows.
CONNECTING = "comm-connect-"

_LOOK_S = 0.05

_limited: WeakSet[threading.Thread] = WeakSet()


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        RuntimeError: there can be no more threads, or Python is being finalized. CPython before 3.12 would wait there
            for ever, as such a thread never runs.
    """
    if sys.is_finalizing():
        raise RuntimeError("can't create new thread at interpreter shutdown")
    thread.start()


def with_limit(
    call: Callable[[], Any],
    limit_s: float,
    name: str = "comm-limited",
    needs_thread: bool = True,
    look: Callable[[], None] | None = None,
) -> Any:
    """Run ``call`` in a thread and return its result or its error; None where that takes longer.

    Args:
        needs_thread: False runs it in the caller's thread, without the limit, where there can be no other.
        look: is called while it runs; where it raises, the thread is left behind, and its error is returned.

    Raises:
        RuntimeError: there can be no thread for it.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        start(thread)
    except (RuntimeError, MemoryError):
        if needs_thread or sys.is_finalizing():
            raise
        try:
            return call()
        except Exception as error:
            return error
    _limited.add(thread)
    end = time.monotonic() + limit_s
    while look is not None and thread.is_alive() and (left_s := end - time.monotonic()) > 0:
        thread.join(min(left_s, _LOOK_S))
        if thread.is_alive():
            try:
                look()
            except Exception as error:
                return error
    thread.join(max(0.0, end - time.monotonic()))
    # Taken out: an error in the list would keep itself alive, and with it every socket of its frames.
    return outcome.pop() if outcome else None


def left_behind() -> list[threading.Thread]:
    """Return the threads of :func:`with_limit` that run on after their limit."""
    return [one for one in members_of(_limited) if one.is_alive()]


def is_still_connecting(library: str) -> bool:
    """Return whether ``library`` still waits for the connections of an attempt that was given up."""
    return bool(abandoned(library))


def abandoned(library: str) -> list[threading.Thread]:
    """Return the threads in which ``library`` still waits for the connections of attempts that were given up."""
    return [thread for thread in threading.enumerate() if thread.name == CONNECTING + library]
