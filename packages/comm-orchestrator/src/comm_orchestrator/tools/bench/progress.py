"""A progress bar on stderr, where somebody looks at it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from comm_orchestrator.tools.bench.plan import Row
from comm_utils.sizes import format_size

__all__ = ["Progress"]


class Progress:
    """Rows done, out of ``total``; nothing at all where stderr is no terminal or rich is missing."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        self._task: Any = None
        if not sys.stderr.isatty():
            return
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar
        except ImportError:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # It refreshes when a row is done, not from a thread, which would take time from what is measured.
        self._bar = Bar(
            *columns,
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("starting", total=total)
        self._bar.start()

    def advance(self, row: Row) -> None:
        """``row`` is done."""
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=f"{row.operation} {format_size(row.size_bytes)}")
            self._bar.refresh()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Out of the way of what is printed meanwhile."""
        if self._bar is None:
            yield
            return
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def close(self) -> None:
        """Leave nothing on the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
