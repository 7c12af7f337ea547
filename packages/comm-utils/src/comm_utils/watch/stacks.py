"""The Python stack of the main thread of this process, and the calls that it has made."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from comm_utils.flight_recorder.call_sites import site_of
from comm_utils.flight_recorder.calls import Call
from comm_utils.flight_recorder.recorder import RECORDER

__all__ = ["StackInRing", "calls_of_main_thread", "main_thread_place"]

_MOST_FRAMES = 40
# A rank that makes no call for so long shows where it is.
_IDLE_S = 0.5


class StackInRing:
    """Keeps the stack in this rank's ring current while it makes no calls."""

    def __init__(self) -> None:
        # How many calls this rank had begun, since when, and where the main thread was then.
        self._calls, self._since = -1, 0.0
        self._place: object = None

    def update(self, calls: int) -> None:
        """Write the stack if this rank has begun ``calls`` calls in all, and none for a while."""
        now = time.monotonic()
        if calls != self._calls:
            self._calls, self._since = calls, now
        elif now - self._since >= _IDLE_S:
            place = main_thread_place()
            if place != self._place:
                self._place = place
                RECORDER.memory.set_stack(_stack_text(_main_thread_frame()))


def main_thread_place() -> object:
    """Return where the main thread is in Python; it stays the same while that waits in native code."""
    frame = _main_thread_frame()
    return None if frame is None else (id(frame), frame.f_lasti)


def calls_of_main_thread(calls: Sequence[Call]) -> list[Call]:
    """Return those of the calls under way of this process that the main thread may have made.

    Records do not have the thread, so the functions that made the calls are compared with those that threads are in. A
    call that nobody is in any more may be one that the main thread left by an exception.
    """
    stacks = sys._current_frames()
    main = threading.main_thread().ident
    own = _functions(None if main is None else stacks.pop(main, None))
    others = {function for frame in stacks.values() for function in _functions(frame)} - own
    return [call for call in calls if _function_of(call.caller) not in others]


def _functions(frame: FrameType | None) -> set[tuple[str, str]]:
    found = set()
    while frame is not None:
        found.add(_function_of(site_of(frame)))
        frame = frame.f_back
    return found


def _function_of(site: str) -> tuple[str, str]:
    """Return file and function: the end of an asynchronous call may be awaited some lines after its begin."""
    file, _, rest = site.rpartition(":")
    return file, rest.partition(" ")[2]


def _main_thread_frame() -> FrameType | None:
    """Return the frame that the main thread is in."""
    main = threading.main_thread().ident
    return sys._current_frames().get(main) if main is not None else None


def _stack_text(frame: FrameType | None) -> str:
    """Return a stack as lines, the innermost last.

    Lines of source are not read: a stack is taken of programs that run.
    """
    lines: list[str] = []
    while frame is not None and len(lines) < _MOST_FRAMES:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return "\n".join(reversed(lines))
