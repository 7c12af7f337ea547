"""One logger for all packages, with the rank in front of every line.

It gets no ``NullHandler``: in a program that has not set up logging, Python's handler of last resort then writes
warnings to stderr, and nothing below them.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator

from comm_utils.full_pipes import would_block

__all__ = ["LOGGER_NAME", "RankFormatter", "is_shown_on_stderr", "logger", "remember_rank", "show_on_stderr"]

LOGGER_NAME = "comm"
logger = logging.getLogger(LOGGER_NAME)


class _Rank:
    text = ""


class _Own:
    #: The level that :func:`show_on_stderr` has set.
    level = logging.NOTSET


def remember_rank(rank: int | None) -> None:
    """Put ``[rank N]`` in front of what this process logs from now on; None takes it off."""
    _Rank.text = "" if rank is None else f"[rank {rank}] "


class RankFormatter(logging.Formatter):
    """``2026-01-31 12:00:00 INFO [rank 3] comm: message``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(rank)s%(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.rank = _Rank.text
        return super().format(record)


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Looks ``sys.stderr`` up for every record, so that a redirection made later is honoured."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(RankFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


class _KeepsGoing(logging.Filter):
    """Leaves out what a thread of this library would have to wait for a reader to write.

    It would wait with the lock of the handler, as long as nobody reads the pipe: the watch would see nothing more, and
    the process would not end.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if not threading.current_thread().name.startswith("comm-"):
            return True
        size_bytes = 4 * len(record.getMessage())
        return not any(would_block(getattr(handler, "stream", None), size_bytes) for handler in _handlers())


def _handlers() -> Iterator[logging.Handler]:
    """Return those that a record of :data:`logger` comes to."""
    found, current = False, logger
    while current is not None:
        found = found or bool(current.handlers)
        yield from current.handlers
        if not current.propagate or current.parent is None:
            break
        current = current.parent
    if not found and logging.lastResort is not None:
        yield logging.lastResort


logger.addFilter(_KeepsGoing())


def show_on_stderr(level: int = logging.INFO) -> None:
    """Make the logger visible from ``level`` on, unless the program has set up logging already.

    Called again, it changes the level of what it made visible.
    """
    configured = [
        h for h in (*logger.handlers, *logging.getLogger().handlers) if not isinstance(h, logging.NullHandler)
    ]
    if not configured:
        logger.addHandler(_Stderr())
    for handler in logger.handlers:
        if isinstance(handler, _Stderr):
            handler.setLevel(level)
    # A level that the program has set stays.
    if logger.level == logging.NOTSET or (logger.level == _Own.level and level < logger.level):
        logger.setLevel(level)
        _Own.level = level


def is_shown_on_stderr() -> bool:
    """Return whether :func:`show_on_stderr` made the logger visible."""
    return any(isinstance(handler, _Stderr) for handler in logger.handlers)
