"""Facts that are the same for all rows of a file, such as the rank that wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from comm_utils.errors import ArgumentError
from comm_utils.observability.comms_logger import Row

__all__ = ["COLUMNS", "check_facts"]

#: The fields of a row, in their order.
COLUMNS = tuple(field.name for field in fields(Row))


def check_facts(facts: Mapping[str, Any]) -> None:
    """See that every fact has a name of its own and is a number, text or None.

    Raises:
        ArgumentError: it is not so.
    """
    for name, value in facts.items():
        if name in COLUMNS:
            raise ArgumentError(f"export: got the fact {name!r}, which is a column of every row; give it another name")
        if not (value is None or isinstance(value, str | int | float)):
            kind = type(value).__name__
            raise ArgumentError(f"export: {name}: got a {kind}, expected text, a number, a bool or None")
