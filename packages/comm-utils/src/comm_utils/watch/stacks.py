"""The Python stack of the main thread of this process."""

from __future__ import annotations

import sys
import threading
from types import FrameType

__all__ = ["main_thread_frame", "stack_text"]

_MOST_FRAMES = 40


def main_thread_frame() -> FrameType | None:
    """Return the frame that the main thread is in."""
    main = threading.main_thread().ident
    return sys._current_frames().get(main) if main is not None else None


def stack_text(frame: FrameType | None) -> str:
    """Return a stack as lines, the innermost last.

    Lines of source are not read: a stack is taken of programs that run.
    """
    lines: list[str] = []
    while frame is not None and len(lines) < _MOST_FRAMES:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return "\n".join(reversed(lines))
