"""Rows as JSON lines and as CSV."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from typing import IO, Any

from comm_utils.atomic_write import replacing
from comm_utils.csv_cells import cell
from comm_utils.errors import ArgumentError
from comm_utils.observability.comms_logger import Row
from comm_utils.observability.exports.facts import COLUMNS, check_facts

__all__ = ["write_csv", "write_jsonl"]


def write_jsonl(path: str | os.PathLike[str], rows: Iterable[Row], **facts: Any) -> None:
    """Write an object for each row, on a line of its own: the facts, then the fields of :class:`Row`.

    Args:
        facts: what is the same for all rows, such as ``rank=3``.

    Raises:
        ArgumentError: a fact that is neither text nor a finite number, or has the name of a field; no such folder.
        OSError: the file cannot be written.
    """
    check_facts(facts)
    objects = [{**facts, **asdict(row)} for row in rows]
    try:
        lines = [json.dumps(one, allow_nan=False) + "\n" for one in objects]
    except ValueError:
        raise ArgumentError(f"export: JSON has neither infinity nor NaN; got {facts}") from None
    with replacing(path) as file:
        file.writelines(lines)


def write_csv(path: str | os.PathLike[str], rows: Iterable[Row], **facts: Any) -> None:
    """Write a heading, and a line for each row: the facts in the order given, then the fields of :class:`Row`.

    Lines end with a line feed; ``ranks`` are separated by spaces; None is an empty cell. Text that a spreadsheet would
    execute (``=``, ``+``, ``-``, ``@``, a tab or a carriage return at its beginning) gets an apostrophe in front.

    Args:
        facts: what is the same for all rows, such as ``rank=3``.

    Raises:
        ArgumentError: a fact that is neither text nor a number, or has the name of a field; no such folder.
        OSError: the file cannot be written.
    """
    check_facts(facts)
    with replacing(path) as file:
        writer = csv.writer(_Lines(file))
        writer.writerow(map(cell, [*facts, *COLUMNS]))
        for row in rows:
            cells = {**facts, **asdict(row), "ranks": " ".join(map(str, row.ranks))}
            writer.writerow(map(cell, cells.values()))


class _Lines:
    """End rows with a line feed. A writer of the csv module that does so leaves carriage returns unquoted."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, row: str) -> int:
        return self._file.write(row.removesuffix("\r\n") + "\n")
