"""Rows in Prometheus' text format, version 0.0.4.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/. The textfile collector of node_exporter reads
files whose names end with ``.prom``, refuses timestamps, and wants one HELP text for a name in all its files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from comm_utils.atomic_write import replacing
from comm_utils.errors import ArgumentError
from comm_utils.log import logger
from comm_utils.observability.comms_logger import Row
from comm_utils.observability.exports.facts import check_facts
from comm_utils.observability.exports.groups import format_ranks

__all__ = ["write_prometheus"]

_COUNTERS: tuple[tuple[str, str, Callable[[Row], float]], ...] = (
    ("comm_operations_total", "Communication operations that ended.", lambda row: row.calls),
    ("comm_bytes_total", "Bytes of these operations, as nccl-tests counts them.", lambda row: row.total_bytes),
    ("comm_seconds_total", "Seconds from the calls of these operations to their ends.", lambda row: row.total_s),
)
_SUMMARY = "comm_operation_seconds"
_SUMMARY_HELP = "Seconds from the call of an operation to its end; the quantiles 0 and 1 are the extremes."
_QUANTILES: tuple[tuple[str, Callable[[Row], float]], ...] = (
    ("0", lambda row: row.min_s),
    ("0.5", lambda row: row.median_s),
    ("0.95", lambda row: row.p95_s),
    ("1", lambda row: row.max_s),
)
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_OURS = ("operation", "name", "size_bytes", "world_size", "ranks", "caller", "method", "wire_bytes")
# Left out where no row has them: an empty label is none, and node_exporter wants the same labels in all series.
_OPTIONAL = ("caller", "method", "wire_bytes")
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def write_prometheus(path: str | os.PathLike[str], rows: Iterable[Row], **labels: Any) -> None:
    """Write counters of operations, bytes and seconds, and a summary of the times, for each row.

    Labels of a row are ``operation``, ``name``, ``size_bytes``, ``world_size``, ``ranks`` (those of large groups as
    runs, ``0-63``) and, where they are known, ``caller``, and ``method`` and ``wire_bytes`` of compressed calls.

    Args:
        labels: what all rows have besides, such as ``rank=3``. What differs each time, such as the time, is no label:
            every value makes new series.

    Raises:
        ArgumentError: a label that Prometheus does not take, or one of a row; no such folder.
        OSError: the file cannot be written.
    """
    check_facts(labels)
    for name in labels:
        if not _LABEL.fullmatch(name) or name in (*_OURS, "quantile"):
            raise ArgumentError(
                f"write_prometheus: got the label {name!r}; expected letters, digits and _, no digit or __ at the "
                f"beginning, and none of {', '.join(_OURS)}, quantile"
            )
    if not os.fspath(path).endswith(".prom"):
        logger.warning("%s: node_exporter reads only files whose names end with .prom", os.fspath(path))
    text = "".join(f"{line}\n" for line in _lines(list(rows), labels))
    with replacing(path) as file:
        file.write(text)


def _lines(rows: list[Row], more: Mapping[str, Any]) -> Iterator[str]:
    absent = {name for name in _OPTIONAL if not any(getattr(row, name) for row in rows)}
    labelled = [(row, _labels(row, absent, more)) for row in rows]
    for name, help_text, value in _COUNTERS:
        yield f"# HELP {name} {help_text}"
        yield f"# TYPE {name} counter"
        for row, labels in labelled:
            yield f"{name}{{{labels}}} {value(row)!r}"
    yield f"# HELP {_SUMMARY} {_SUMMARY_HELP}"
    yield f"# TYPE {_SUMMARY} summary"
    for row, labels in labelled:
        for share, value in _QUANTILES:
            yield f'{_SUMMARY}{{{labels},quantile="{share}"}} {value(row)!r}'
        yield f"{_SUMMARY}_sum{{{labels}}} {row.total_s!r}"
        yield f"{_SUMMARY}_count{{{labels}}} {row.calls!r}"


def _labels(row: Row, absent: Collection[str], more: Mapping[str, Any]) -> str:
    found = {name: getattr(row, name) for name in _OURS if name not in absent}
    found["ranks"] = format_ranks(row.ranks)
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in {**found, **more}.items())


def _escaped(value: Any) -> str:
    text = "" if value is None else str(value)
    return text.encode("utf-8", "backslashreplace").decode().translate(_ESCAPES)
