"""Show the rows of ``commctl top``: as a table, or on a terminal again each second."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from comm_orchestrator.rendezvous.records import format_ranks
from comm_orchestrator.tools.fitted_table import FittedTable
from comm_orchestrator.tools.output import printable
from comm_orchestrator.tools.rings import JobRings, seconds
from comm_orchestrator.tools.top.rows import Row
from comm_orchestrator.tools.trace.tables import significant
from comm_utils.sizes import format_size

__all__ = ["Parts", "parts", "repeat"]

Parts = list[FittedTable | str]

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COLUMNS = ("rank", "pid", "state", "call", "size", "group", "since", "calls/s", "bytes/s", "waits for")


def parts(job: JobRings, rows: Sequence[Row]) -> Parts:
    """Return a headline, the table, and what is missing."""
    found = FittedTable(_COLUMNS, left=(2, 3, 5, 9), above=())
    for row in rows:
        found.add_row(*_cells(row))
    lines = [f"damaged: {one}" for one in job.damaged]
    damaged = "damaged, " if job.damaged else ""
    lines += [f"no ring: {format_ranks(job.absent)} ({damaged}of another host, or ended)"] if job.absent else []
    return [f"job {printable(job.name)} of {job.world_size} rank{'s' if job.world_size != 1 else ''}", found, *lines]


def _cells(row: Row) -> list[str]:
    return [
        str(row.rank),
        str(row.pid),
        row.state,
        row.call or "-",
        format_size(row.size_bytes) if row.call and row.size_bytes else "",
        row.group,
        "" if row.since_s is None else seconds(row.since_s * 1e9),
        "" if row.calls_per_s is None else significant(row.calls_per_s),
        "" if row.bytes_per_s is None else format_size(row.bytes_per_s),
        format_ranks(row.waits_for) if row.waits_for else "",
    ]


class _LeftError(Exception):
    pass


def repeat(look: Callable[[], Parts], interval_s: float) -> None:
    """Show what ``look`` returns again and again, until q or Ctrl-C; SIGTERM and SIGHUP end the process."""
    console = Console(highlight=False)
    # A signal that is ignored, as under nohup, stays so.
    before = {one: known for one in _ENDS if (known := signal.getsignal(one)) is not signal.SIG_IGN}
    received = 0

    def leave(number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received = number
        for one in before:  # another one would leave the terminal as it is
            signal.signal(one, signal.SIG_IGN)
        raise _LeftError

    try:
        for one in before:
            signal.signal(one, leave)
        with suppress(_LeftError), _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                shown = [Text(part) if isinstance(part, str) else part for part in look()]
                live.update(Group(*shown, Text("q ends", style="dim")), refresh=True)
                if pressed(interval_s) == "q":
                    return
    finally:
        for one, known in before.items():
            signal.signal(one, known)
        if received not in (0, signal.SIGINT):
            signal.raise_signal(received)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Provide a function that waits so many seconds for a key and returns it, ``""`` without one."""
    if not sys.stdin.isatty() or not _in_foreground(descriptor := sys.stdin.fileno()):
        yield _no_key
        return
    import termios
    import tty

    settings = termios.tcgetattr(descriptor)

    def pressed(timeout_s: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], timeout_s)
        return os.read(descriptor, 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        if _in_foreground(descriptor):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, settings)


def _in_foreground(descriptor: int) -> bool:
    """Report if this process may change the settings of a terminal: one in its background is stopped for that."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # not the controlling terminal, so nothing stops this process
        return True


def _no_key(timeout_s: float) -> str:
    time.sleep(timeout_s)
    return ""
