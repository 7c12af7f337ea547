"""Ctrl-C and SIGTERM while the main thread waits inside a library, where Python's handlers cannot run.

Python's handlers of signals run in the main thread between two bytecodes; a wait inside gloo has none for as long as it
lasts. The interpreter also writes each signal into a descriptor, which the watch's thread reads.

Other code, such as asyncio's ``remove_signal_handler``, may take that descriptor away, and only the main thread can put
it back. A SIGTERM must not be lost then, so ``faulthandler`` writes a traceback into the pipe as well, from the signal
handler itself, and calls the interpreter's handler afterwards.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import threading
from contextlib import suppress
from types import FrameType

from comm_utils.flight_recorder.recorder import RECORDER

__all__ = ["SignalPipe", "acts_on", "end_by", "has_reported", "has_terminated"]


# Of pipes whose writing end is still the interpreter's descriptor, as their watch ended outside of the main thread. The
# next watch takes one over.
_left: list[tuple[int, int]] = []
# Bytes from here on are those of a traceback; signals have smaller numbers.
_FIRST_LETTER = ord("A")
_READ_BYTES = 1 << 16


class SignalPipe:
    """Hears of signals for which Python has a handler; of SIGTERM too, where the program has none.

    It does nothing where another part of the program (asyncio) reads signals already, and outside of the main thread.
    """

    def __init__(self, wanted: bool) -> None:
        self._is_set = bool(_left)
        self._reading, self._writing = _left.pop() if _left else os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._poll = select.poll()
        self._poll.register(self._reading, select.POLLIN)
        self.wait(0)  # what came for an earlier watch
        self._handles_term = False
        if wanted and threading.current_thread() is threading.main_thread():
            before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            if before not in (-1, self._writing):
                signal.set_wakeup_fd(before)
                self._is_set = False
                return
            self._is_set = True
            is_free = signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _terminate)
            if is_free and not _has_native_handler(signal.SIGTERM):
                signal.signal(signal.SIGTERM, _terminate)
                faulthandler.register(signal.SIGTERM, self._writing, all_threads=False, chain=True)
                self._handles_term = True

    def wait(self, seconds: float) -> bytes:
        """Return the signals that came within so long, a byte each; at once after :meth:`wake`."""
        if not self._poll.poll(seconds * 1000):
            return b""
        with suppress(BlockingIOError, OSError):
            came = os.read(self._reading, _READ_BYTES)
            has_traceback = any(byte >= _FIRST_LETTER for byte in came)
            return came + bytes((signal.SIGTERM,)) if has_traceback else came
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
            return
        # Python's tables can be changed in the main thread only.
        if self._handles_term and signal.getsignal(signal.SIGTERM) is _terminate:
            faulthandler.unregister(signal.SIGTERM)
            ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
        if self._is_set:
            _left.append((self._reading, self._writing))
        else:
            _close(self._reading, self._writing)

    def before_exit(self) -> None:
        """Let ``faulthandler``, which Python finalizes after signals, put back no handler of the interpreter then."""
        if self._handles_term and signal.getsignal(signal.SIGTERM) is _terminate:
            faulthandler.unregister(signal.SIGTERM)

    def leave_to_parent(self) -> None:
        """Do the same in a forked child, where a signal would reach the parent's watch through the shared pipe."""
        self._put_back()

    def _put_back(self) -> None:
        if self._is_set:
            current = signal.set_wakeup_fd(-1)
            if current not in (-1, self._writing):  # the program has set its own since
                signal.set_wakeup_fd(current)
        if self._handles_term:
            handler = signal.getsignal(signal.SIGTERM)
            if handler is not None:  # as it is after Python's own end of signals, which has put back the default
                faulthandler.unregister(signal.SIGTERM)
                signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is _terminate else handler)
        self._is_set = self._handles_term = False
        _close(self._reading, self._writing)


def _has_native_handler(number: int) -> bool:
    """Return whether the process handles a signal, also by what Python does not know of: ``faulthandler`` or a library.

    No pipe of an earlier world does so: it has put back the default.
    """
    action = (ctypes.c_void_p * 64)()  # begins with the handler, and is far smaller
    read = ctypes.CDLL(None).sigaction(int(number), None, action)
    return read != 0 or action[0] is not None


def _close(*descriptors: int) -> None:
    for one in descriptors:
        with suppress(OSError):
            os.close(one)


def _leave_pipe_to_parent() -> None:
    """Have no signal of a forked child written into a pipe that the parent keeps."""
    for reading, writing in _left:
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, writing):
            signal.set_wakeup_fd(current)
        _close(reading, writing)
    _left.clear()


os.register_at_fork(after_in_child=_leave_pipe_to_parent)

_terminated, _reported = threading.Event(), threading.Event()
# The thread of the watch is given so long to say what the ranks do.
_REPORT_S = 0.5


def _terminate(number: int, frame: FrameType | None) -> None:
    _terminated.set()
    RECORDER.memory.set_word("signal", number)
    _reported.wait(_REPORT_S)
    signal.signal(number, signal.SIG_DFL)
    _end(number)


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
    _end(number)


def _end(number: int) -> None:
    os.kill(os.getpid(), number)
    # The kernel ignores it where this is process 1 of its pid namespace, as in a container without an init.
    os._exit(128 + number)
