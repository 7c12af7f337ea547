"""Bound the time of calls that may never return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["StuckError", "anything_stuck", "within"]

T = TypeVar("T")
_threads: list[threading.Thread] = []


class StuckError(TimeoutError):
    """A call did not come back in time, and still has not."""


def within(limit_s: float, call: Callable[[], T], doing: str) -> T:
    """Run ``call`` within the limit; return its result, or raise its error.

    A library that hangs cannot be interrupted, only left behind: in a thread.

    Raises:
        StuckError: it takes longer than ``limit_s``.
    """
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="comm-doctor", daemon=True)
    _threads.append(thread)
    thread.start()
    thread.join(limit_s)
    if not outcome:
        raise StuckError(f"{doing} did not come back within {limit_s:g} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    result: T = value
    return result


def anything_stuck() -> bool:
    """Return whether a call that was left behind still runs; an orderly end of the process may then hang or crash."""
    return any(thread.is_alive() for thread in _threads)
