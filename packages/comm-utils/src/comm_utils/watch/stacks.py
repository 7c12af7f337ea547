"""The Python stacks of this process: of its threads, the one that makes calls last, and the main thread's calls."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

from comm_utils.flight_recorder.call_sites import runs_program, site_of
from comm_utils.flight_recorder.calls import Call
from comm_utils.flight_recorder.layout import LANES
from comm_utils.flight_recorder.reader import RingReader
from comm_utils.flight_recorder.recorder import RECORDER

__all__ = ["StackInRing", "calls_of_main_thread", "main_thread_place"]

_MOST_FRAMES = 40
# Threads of the program beside the one that makes calls, and the frames of each.
_MOST_OTHERS, _MOST_FRAMES_OF_OTHERS = 8, 12
# A rank that makes no call for so long shows where it is.
_IDLE_S = 0.5


class StackInRing:
    """Keeps the stacks in this rank's ring current while it makes no calls."""

    def __init__(self) -> None:
        # How many calls this rank had begun, since when, the thread that made them, and where the threads were then.
        self._calls, self._since = -1, 0.0
        self._thread: threading.Thread | None = None
        self._place: object = None

    def update(self, own: RingReader) -> None:
        """Write the stacks if this rank, whose ring ``own`` reads, has begun no call for a while."""
        calls, now = sum(own.count(lane) for lane in range(LANES)), time.monotonic()
        if calls != self._calls:
            self._calls, self._since, self._thread = calls, now, None
            self._place = None  # a stack older than the last call tells nothing
        elif now - self._since >= _IDLE_S:
            thread, frame, name = self._calling_frame(own)
            others = _others_in_program(thread)
            place = [_place_of(one) for one in (frame, *(one for one, _ in others))]
            if place != self._place:
                self._place = place
                # The end of the text is what is kept of a long one, and read first.
                texts = [_stack_text(one, other, _MOST_FRAMES_OF_OTHERS) for one, other in reversed(others)]
                RECORDER.memory.set_stack("\n\n".join([*texts, _stack_text(frame, name, _MOST_FRAMES)]))

    def _calling_frame(self, own: RingReader) -> tuple[threading.Thread, FrameType | None, str]:
        """Return the thread that makes calls, its frame and its name; "" for the main thread."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = _calling_thread(_last_site(own))
        if self._thread is not threading.main_thread() and self._thread.ident is not None:
            frame = sys._current_frames().get(self._thread.ident)
            if frame is not None:
                return self._thread, frame, self._thread.name
        return threading.main_thread(), _main_thread_frame(), ""


def main_thread_place() -> object:
    """Return where the main thread is in Python; it stays the same while that waits in native code."""
    return _place_of(_main_thread_frame())


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


def _place_of(frame: FrameType | None) -> object:
    return None if frame is None else (id(frame), frame.f_lasti)


def _last_site(own: RingReader) -> str:
    """Return where in the program this rank made its last call; "" where that is not known."""
    calls = [call for lane in range(LANES) if (call := own.call(lane, own.count(lane))) is not None]
    return max(calls, key=lambda call: call.begin_ns).caller if calls else ""


def _calling_thread(last_site: str) -> threading.Thread:
    """Return the thread that is in the function that made the last call; where none is, the one that may have left it.

    The main thread comes first in both cases.
    """
    main, last = threading.main_thread(), RECORDER.last_caller
    callers = [one for one in threading.enumerate() if RECORDER.has_called(one)]
    if any(one is not main for one in callers):
        function, frames = _function_of(last_site), sys._current_frames()
        inside = [one for one in callers if one.ident and function in _functions(frames.get(one.ident))]
        for found in (inside, callers):
            first = next((one for one in (main, last, *inside) if one in found), None)
            if first is not None:
                return first
    return main


def _others_in_program(calling: threading.Thread) -> list[tuple[FrameType, str]]:
    """Return frames and names of threads that run code of the program, and may hold what ``calling`` waits for.

    Those of installed packages, such as monitors, come last.
    """
    frames = sys._current_frames()
    # This frame holds the frames: its own among them would keep all of them, and their tensors, alive.
    frames.pop(threading.get_ident(), None)
    threads = [one for one in threading.enumerate() if one is not calling and one.ident in frames]
    found = [(frames[one.ident], one.name) for one in threads if one.ident is not None]
    found = [(frame, name) for frame, name in found if runs_program(frame)]
    return sorted(found, key=lambda one: not runs_program(one[0], counts_packages=False))[:_MOST_OTHERS]


def _main_thread_frame() -> FrameType | None:
    """Return the frame that the main thread is in."""
    main = threading.main_thread().ident
    return sys._current_frames().get(main) if main is not None else None


def _stack_text(frame: FrameType | None, thread: str, most_frames: int) -> str:
    """Return a stack as lines, the innermost last, which has the name of the thread unless it is "".

    Lines of source are not read: a stack is taken of programs that run.
    """
    lines: list[str] = []
    while frame is not None and len(lines) < most_frames:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return "\n".join(reversed(lines)) + (f", in thread {thread!r}" if thread else "")
