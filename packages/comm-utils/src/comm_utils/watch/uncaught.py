"""Exceptions that end this process, a thread of it that makes calls, or its world: noted for ranks that wait for it."""

from __future__ import annotations

import sys
import threading
from types import TracebackType

from comm_utils.errors import CommError
from comm_utils.flight_recorder.recorder import RECORDER

__all__ = ["note_exception_in_flight", "note_uncaught_exceptions", "put_back_hook"]

_before_world = sys.excepthook


def put_back_hook() -> None:
    """Put back the hook from before an earlier world: torch adds one for each, and each prints a prefix."""
    global _before_world
    if getattr(sys.excepthook, "notes_in_ring", False):
        sys.excepthook = _before_world
    else:
        _before_world = sys.excepthook


def note_uncaught_exceptions() -> None:
    """Have exceptions that nobody catches noted in this rank's ring, before what printed them so far prints them."""
    _note_those_of_threads()
    before = sys.excepthook
    if getattr(before, "notes_in_ring", False):
        return

    def note(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
        _note(error)
        before(kind, error, place)

    note.notes_in_ring = True  # type: ignore[attr-defined]
    sys.excepthook = note


def _note_those_of_threads() -> None:
    before = threading.excepthook
    if getattr(before, "notes_in_ring", False):
        return

    def note(hooked: threading.ExceptHookArgs) -> None:
        error, thread = hooked.exc_value, threading.current_thread()
        if error is not None and not isinstance(error, SystemExit) and RECORDER.has_called(thread):
            _note(error, f"in thread {thread.name!r}")
        before(hooked)

    note.notes_in_ring = True  # type: ignore[attr-defined]
    threading.excepthook = note


def note_exception_in_flight() -> None:
    """Note the exception because of which the world ends now, as ``finally: destroy_process_group()`` ends it."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit) and not error.code:
        return
    if error is not None:
        _note(error)


def _note(error: BaseException, where: str = "") -> None:
    if RECORDER.path is not None and not isinstance(error, CommError):  # those were noted where they were raised
        RECORDER.failure("", type(error).__name__, ", ".join(part for part in (str(error)[:500], where) if part))
