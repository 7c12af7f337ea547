"""One call for every format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from comm_utils.errors import ArgumentError
from comm_utils.observability.comms_logger import Row
from comm_utils.observability.exports.prometheus import write_prometheus
from comm_utils.observability.exports.tables import write_csv, write_jsonl

__all__ = ["FORMATS", "export"]


def _lasting(path: str | os.PathLike[str], rows: Iterable[Row], **facts: Any) -> None:
    facts.pop("time", None)  # as a label, every export would make new series; node_exporter knows the file's own time
    write_prometheus(path, rows, **facts)


#: What a name ends with, without the dot -> what writes it.
FORMATS: dict[str, Callable[..., None]] = {"jsonl": write_jsonl, "csv": write_csv, "prom": _lasting}


def export(path: str | os.PathLike[str], rows: Iterable[Row], format: str | None = None, **facts: Any) -> None:
    """Write ``rows`` to ``path``.

    Args:
        format: ``"jsonl"``, ``"csv"`` or ``"prom"``; None: what the name of the file ends with.
        facts: what is the same for all rows, such as ``rank=3``: text, numbers, bools or None. They are columns, or
            labels of ``.prom``, but for ``time``.

    Raises:
        ArgumentError: no such format or folder, a fact that is none, or one with the name of a column.
        OSError: the file cannot be written.
    """
    name = Path(path).suffix.removeprefix(".") if format is None else format
    write = FORMATS.get(name)
    if write is None and format is None:
        endings = " or ".join(f".{one}" for one in FORMATS)
        raise ArgumentError(
            f"export: got {os.fspath(path)!r}, expected a name that ends with {endings}; or give format="
        )
    if write is None:
        raise ArgumentError(f"export: got format={format!r:.60}, expected one of {', '.join(map(repr, FORMATS))}")
    write(path, rows, **facts)
