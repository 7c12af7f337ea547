"""The operations that are known: those of the table, those that a program registers, and those of installed packages.

A package offers rows through entry points of the group ``comm_utils.operations``, each a ``module:row`` or a function
without arguments that returns one. They are read when a name is not in the table, and when all rows are listed.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from comm_utils.errors import ArgumentError
from comm_utils.log import logger
from comm_utils.operations.table import ROWS
from comm_utils.operations.types import OperationSpec
from comm_utils.plugins import entry_points, load

__all__ = [
    "ENTRY_POINT_GROUP",
    "UnknownOperationError",
    "benchmarked",
    "find",
    "function_of",
    "get",
    "is_benchmarked",
    "record_name",
    "recorded",
    "register",
    "rows",
    "unregister",
]

ENTRY_POINT_GROUP = "comm_utils.operations"

_rows: dict[str, OperationSpec] = {row.name: row for row in ROWS}
_entry_points_read: set[tuple[str, str]] = set()


class UnknownOperationError(ArgumentError, KeyError):
    """No row has the name."""

    def __str__(self) -> str:  # KeyError's would quote it
        return str(self.args[0]) if self.args else ""


def register(row: OperationSpec) -> OperationSpec:
    """Add ``row`` to the table, for this process.

    Logger, sizes, traces, replay, benchmarks and cost model then know the operation.

    Returns:
        ``row``.

    Raises:
        ArgumentError: another row has the name, or ``row`` refers to an operation without one.
    """
    if _rows.get(row.name, row) != row:
        raise ArgumentError(
            f"operations.register: got a second row for {row.name!r}; expected a new name; "
            f"take the first out with operations.unregister({row.name!r}), or choose another name"
        )
    for name in {row.measured_as, *row.travels_as} - {row.name}:
        get(name)
    _rows[row.name] = row
    return row


def unregister(name: str) -> None:
    """Take a registered row out of the table again.

    Raises:
        UnknownOperationError: there is none.
        ArgumentError: it is one of this package's own rows.
    """
    if any(row.name == name for row in ROWS):
        raise ArgumentError(f"operations.unregister: got {name!r}, which is built in; expected a registered operation")
    del _rows[get(name).name]


def find(name: str) -> OperationSpec | None:
    """Return the row of ``name``, None where there is none."""
    found = _rows.get(name)
    if found is None:
        _read_entry_points()
        found = _rows.get(name)
    return found


def get(name: str) -> OperationSpec:
    """Return the row of ``name``.

    Raises:
        UnknownOperationError: there is none; names the nearest.
    """
    found = _rows.get(name)
    if found is None:
        found = find(name)
    if found is None:
        near = difflib.get_close_matches(str(name), _rows, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(_rows))}"
        raise UnknownOperationError(
            f"got the operation {name!r:.60}; expected one with a row in comm_utils.operations ({hint}); "
            "add one with comm_utils.operations.register()"
        )
    return found


def rows() -> Iterator[OperationSpec]:
    """Return every row, those of this package first."""
    _read_entry_points()
    return iter(tuple(_rows.values()))


def recorded() -> frozenset[str]:
    """Return the names under which logger and traces know operations."""
    return frozenset(row.name for row in rows() if row.recorded)


def benchmarked() -> tuple[str, ...]:
    """Return the names of the operations that benchmarks measure, in the order of the table."""
    return tuple(row.name for row in rows() if row.benchmarked)


def is_benchmarked(name: str) -> bool:
    """Return whether benchmarks measure an operation of this name."""
    found = find(name)
    return found is not None and found.benchmarked


def record_name(operation: str, call: str) -> str:
    """Return the name under which ``operation`` of a backend is recorded in the course of ``call``.

    That is the call's own where ``operation`` carries out the whole of it, so that sizes and bandwidths mean the same.
    """
    row = _rows.get(call)
    return call if row is not None and row.recorded and operation in row.travels_as else operation


def function_of(row: OperationSpec, namespace: Any = None) -> Callable[..., Any]:
    """Return the function that programs call.

    Args:
        namespace: is asked first, for a function of the row's name.

    Raises:
        ArgumentError: there is none.
    """
    found = getattr(namespace, row.name, None)
    if found is None:
        module, _, name = row.function.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ArgumentError(
                f"{row.name}: got no function at {row.function!r} ({error}); expected 'module:function'; "
                "correct 'function' in the row of the operation"
            ) from None
    function: Callable[..., Any] = found
    return function


def _read_entry_points() -> None:
    for entry in entry_points(ENTRY_POINT_GROUP):
        key = entry.name, entry.value
        if key in _entry_points_read:
            continue
        _entry_points_read.add(key)
        try:
            found = load(entry)
            register(found() if callable(found) else found)
        except Exception as error:
            logger.warning("the operation %s of %s cannot be used: %s", entry.name, entry.value, error)
