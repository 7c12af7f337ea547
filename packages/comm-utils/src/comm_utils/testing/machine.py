"""Adapt tests to the load of the machine, and to the shell that starts them."""

from __future__ import annotations

import os
import signal

__all__ = ["allow_interrupts", "follow", "patience"]

_MOST = 10.0


class _Runner:
    """The factor of the process that runs this rank; None in a process that is no rank."""

    factor: float | None = None


def follow(factor: float) -> None:
    """Have :func:`patience` return ``factor``, which the runner found: ranks that agree on a time limit need one."""
    _Runner.factor = factor


def patience() -> float:
    """Return a factor, 1 or more, for the time that a test gives a machine to do something.

    ``COMM_TESTS_PATIENCE`` in the environment decides. Otherwise it is the number of processes that want to run for
    each core, as the kernel has averaged it over a minute, and at most 10. All ranks of a run return what their runner
    found as it called them.

    Raises:
        ValueError: the variable is not a number of at least 1.
    """
    asked = os.environ.get("COMM_TESTS_PATIENCE")
    if asked is not None:
        factor = float(asked)
        if not factor >= 1:
            raise ValueError(f"COMM_TESTS_PATIENCE: got {asked}; expected a number of at least 1")
        return factor
    if _Runner.factor is not None:
        return _Runner.factor
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(1.0, os.getloadavg()[0] / cores), _MOST)


def allow_interrupts() -> None:
    """Let SIGINT interrupt this process and those it starts, also where ``nohup`` or ``&`` of a script ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
