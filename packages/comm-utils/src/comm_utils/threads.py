"""Starts of threads that fail, and never hang, where there can be no more of them."""

from __future__ import annotations

import sys
import threading

__all__ = ["start"]


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        RuntimeError: there can be no more threads, or Python is being finalized. CPython before 3.12 would wait there
            for ever, as such a thread never runs.
    """
    if sys.is_finalizing():
        raise RuntimeError("can't create new thread at interpreter shutdown")
    thread.start()
