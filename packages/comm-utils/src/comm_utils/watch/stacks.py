"""The Python stack of the main thread of this process."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

from comm_utils.flight_recorder.recorder import RECORDER

__all__ = ["StackInRing", "main_thread_place"]

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
