"""Ctrl-C and SIGTERM while the main thread waits inside a library, where Python's handlers cannot run.

Python's handlers of signals run in the main thread between two bytecodes; a wait inside gloo has none for as long as it
lasts. The interpreter also writes each signal into a descriptor, which the watch's thread reads.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from contextlib import suppress
from types import FrameType

from comm_utils.flight_recorder.recorder import RECORDER

__all__ = ["SignalPipe", "acts_on", "end_by", "has_reported", "has_terminated"]


class SignalPipe:
    """Hears of signals for which Python has a handler; of SIGTERM too, where the program has none.

    It does nothing where another part of the program (asyncio) reads signals already, and outside of the main thread.
    """

    def __init__(self, wanted: bool) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._poll = select.poll()
        self._poll.register(self._reading, select.POLLIN)
        self._handles_term = self._is_set = False
        if wanted and threading.current_thread() is threading.main_thread():
            before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            if before >= 0:
                signal.set_wakeup_fd(before)
                return
            self._is_set = True
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, _terminate)
                self._handles_term = True

    def wait(self, seconds: float) -> bytes:
        """Return the signals that came within so long, a byte each; at once after :meth:`wake`."""
        if not self._poll.poll(seconds * 1000):
            return b""
        with suppress(BlockingIOError, OSError):
            return os.read(self._reading, 64)
        return b""

    def wake(self) -> None:
        """Have :meth:`wait` return."""
        with suppress(OSError):
            os.write(self._writing, b"\0")

    def duplicate(self) -> int:
        """Return a descriptor of its own for another thread: a byte that is written there is a :meth:`wake`."""
        return os.dup(self._writing)

    def close(self) -> None:
        """Put back what was there before; to be called when no thread is in :meth:`wait`."""
        if threading.current_thread() is threading.main_thread():
            self._put_back()
        # Elsewhere the descriptor may still be in use: it ends with the process.

    def leave_to_parent(self) -> None:
        """Do the same in a forked child, where a signal would reach the parent's watch through the shared pipe."""
        self._put_back()

    def _put_back(self) -> None:
        if self._is_set:
            current = signal.set_wakeup_fd(-1)
            if current not in (-1, self._writing):  # the program has set its own since
                signal.set_wakeup_fd(current)
        if self._handles_term and signal.getsignal(signal.SIGTERM) is _terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._is_set = self._handles_term = False
        for one in (self._reading, self._writing):
            with suppress(OSError):
                os.close(one)


_terminated, _reported = threading.Event(), threading.Event()
# The thread of the watch is given so long to say what the ranks do.
_REPORT_S = 0.5


def _terminate(number: int, frame: FrameType | None) -> None:
    _terminated.set()
    RECORDER.memory.set_word("signal", number)
    _reported.wait(_REPORT_S)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def has_terminated() -> bool:
    """Return whether the handler of SIGTERM that a :class:`SignalPipe` installed has run."""
    return _terminated.is_set()


def has_reported() -> None:
    """Say that the watch has reported what the ranks do, for which the handler of SIGTERM waits."""
    _reported.set()


def acts_on(number: int) -> bool:
    """Return whether a signal has no handler of the program: the one of a :class:`SignalPipe` or Python's own."""
    return signal.getsignal(number) in (_terminate, signal.default_int_handler)


def end_by(number: int) -> None:
    """End this process by a signal, from any thread, whatever handles it now."""
    RECORDER.memory.set_word("signal", number)
    ctypes.CDLL(None).signal(number, 0)
    os.kill(os.getpid(), number)
