"""Plugins: entry points of installed packages."""

from __future__ import annotations

import functools
import re
import signal
import sys
import traceback
from collections.abc import Iterable
from importlib.metadata import EntryPoint, distributions
from typing import Any

__all__ = ["by_name", "call", "distribution_of", "entry_points", "let_signals_through", "load", "said_twice"]

_GROUPS = "comm_utils."


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of ``group``.

    Read from disk once for every ``sys.path``, because reading takes a while.
    """
    return tuple(entry for entry in _read(tuple(sys.path)) if entry.group == group)


def by_name(entries: Iterable[EntryPoint]) -> dict[str, list[EntryPoint]]:
    """Return the entry points of each name, of which there are several where packages contradict each other.

    Packages that name the same object, as a fork and its original may, do not.
    """
    found: dict[str, list[EntryPoint]] = {}
    for entry in entries:
        same = found.setdefault(entry.name, [])
        if all(entry.value != other.value for other in same):
            same.append(entry)
    return found


def distribution_of(entry: EntryPoint) -> str:
    """Return the name and the version of the installed package that has ``entry``."""
    return "an unknown package" if entry.dist is None else f"{entry.dist.metadata['Name']} {entry.dist.version}"


def said_twice(entries: Iterable[EntryPoint]) -> str:
    """Return which packages have entry points of one name, for an error."""
    named = " and ".join(f"{distribution_of(entry)} ({entry.value})" for entry in entries)
    return f"several installed packages provide it: {named}"


def load(entry: EntryPoint) -> Any:
    """Import the object that ``entry`` names.

    Raises:
        ImportError: the package ended the program instead, with ``sys.exit()``.
    """
    try:
        return entry.load()
    except SystemExit as error:
        let_signals_through(error)
        raise ImportError(f"{distribution_of(entry)} called sys.exit({error.code!r}) while it was imported") from error


def call(entry: EntryPoint, function: Any, *args: Any, **options: Any) -> Any:
    """Return what ``function``, the object that ``entry`` names, returns.

    Raises:
        RuntimeError: it ended the program instead, with ``sys.exit()``.
    """
    try:
        return function(*args, **options)
    except SystemExit as error:
        let_signals_through(error)
        raise RuntimeError(f"{distribution_of(entry)} called sys.exit({error.code!r})") from error


def let_signals_through(error: BaseException) -> None:
    """Raise an error that comes from a signal handler of the program, which a package just happened to meet."""
    handlers = [getattr(handler, "__func__", handler) for handler in map(signal.getsignal, signal.valid_signals())]
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    if any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__)):
        raise error


@functools.lru_cache(maxsize=4)
def _read(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    found: dict[str, list[EntryPoint]] = {}
    for distribution in distributions(path=list(path)):
        ours = [entry for entry in distribution.entry_points if entry.group.startswith(_GROUPS)]
        if ours:
            name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
            found.setdefault(name, ours)  # the first on the path is the one that is imported
    return tuple(entry for ours in found.values() for entry in ours)
