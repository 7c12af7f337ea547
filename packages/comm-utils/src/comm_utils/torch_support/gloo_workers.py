"""Wait until gloo's threads have released the tensors that they worked on."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

__all__ = ["wait_until_idle"]

_NAME = b"pt_gloo_runloop"
_TELLING = (b"State:", b"voluntary_ctxt_switches:", b"nonvoluntary_ctxt_switches:")
_TASKS = Path("/proc/self/task")


def _workers() -> dict[str, tuple[bytes, ...]] | None:
    """Return the state and the number of context switches of each of gloo's threads; None where neither can be read."""
    found = {}
    try:
        for task in _TASKS.iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                if (task / "comm").read_bytes().strip() == _NAME:
                    lines = (task / "status").read_bytes().splitlines()
                    found[task.name] = tuple(line for line in lines if line.startswith(_TELLING))
    except OSError:
        return None
    return found or None


def wait_until_idle(patience_s: float = 1.0, *, unseen_s: float = 0.02) -> None:
    """Wait until gloo's threads are idle, at most ``patience_s`` seconds.

    A thread of gloo reports an operation as complete before it drops the operation's tensors, for which it needs the
    GIL. It aborts the process if the interpreter is ending by then, and waits for ever if the process group is being
    destroyed. A thread that waits for the GIL sleeps as well, but never for longer than Python's switch interval, so
    those that have slept through one are idle.

    Args:
        unseen_s: seconds to wait where the threads cannot be distinguished: before torch 2.7, or outside Linux.
    """
    end = time.monotonic() + patience_s
    before = _workers()
    if before is None:
        time.sleep(unseen_s)
        return
    while (left_s := end - time.monotonic()) > 0:
        time.sleep(min(max(0.002, 1.5 * sys.getswitchinterval()), left_s))
        now = _workers()
        if now is None or (now == before and all(b"S (sleeping)" in seen[0] for seen in now.values())):
            return
        before = now
