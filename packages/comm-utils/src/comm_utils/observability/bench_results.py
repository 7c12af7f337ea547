"""The file that ``commctl bench --json`` writes: what was measured, where, and how.

One JSON object. Sizes and bandwidths are those of nccl-tests (:mod:`comm_utils.sizes`);
times are microseconds per call.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from comm_utils import operations
from comm_utils.atomic_write import replacing
from comm_utils.errors import ArgumentError
from comm_utils.json_files import read_document

__all__ = ["FORMAT", "VERSION", "BenchFile", "BenchResult", "load", "save"]

FORMAT = "comm-bench"
VERSION = 1


@dataclass(frozen=True)
class BenchResult:
    """One operation of one library at one size."""

    operation: str
    """A benchmarked row of :mod:`comm_utils.operations`; a message is one way of a ping-pong: half the round trip."""
    library: str
    """``ours``, ``torch``, ``mpi4py`` or ``deepspeed``."""
    backend: str
    way: str
    """``in_place`` or ``out_of_place``."""
    dtype: str
    op: str
    """The reduction; empty where the operation has none."""
    root: int
    """Rank of the group; -1 where the operation has none."""
    world_size: int
    """Ranks of the group."""
    nodes: int
    """Hosts that the group spans."""
    groups: int
    """Groups of that size that ran at the same time."""
    size_bytes: int
    count: int
    iterations: int
    time_us: float
    """Time per call as the table shows it."""
    min_us: float
    p50_us: float
    p95_us: float
    p99_us: float
    max_us: float
    rounds_us: tuple[float, ...]
    """Time per call in each interleaved round."""
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    wrong: int | None
    """Elements with a wrong value; None where nothing was checked."""
    codec: str = ""
    """What compressed the calls, such as ``"int8(block_size=256)"``; empty for nothing."""
    wire_bytes: int = 0
    """What a rank sent in a call, the most of all ranks; 0 without a codec. Bandwidths are of ``size_bytes``."""

    @property
    def is_empty(self) -> bool:
        """Return whether the operation moves no data, so that it has neither size nor bandwidth."""
        return operations.get(self.operation).pattern.is_empty


@dataclass(frozen=True)
class BenchFile:
    """Everything one run of ``commctl bench`` found out."""

    made: str
    """When, in ISO 8601."""
    command: str
    system: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    results: tuple[BenchResult, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write the file; the old one stays whole until the new one is.

        Raises:
            OSError: it cannot be written.
        """
        with replacing(path) as file:
            json.dump(self.to_json(), file, indent=1, allow_nan=False)
            file.write("\n")

    @classmethod
    def load(cls, path: str | Path) -> BenchFile:
        """Read a file that :meth:`save` wrote.

        Raises:
            OSError: it cannot be read.
            ArgumentError: it is not a bench file, of another version, or something in it is missing or of a wrong type.
        """
        try:
            data = read_document(path)
        except ArgumentError as error:
            raise ArgumentError(f"{error}; {_REMEDY}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            got = repr(data.get("format"))[:80] if isinstance(data, dict) else type(data).__name__
            raise ArgumentError(_message(path, f"format {got}"))
        if data.get("version") != VERSION:
            raise ArgumentError(_message(path, f"version {data.get('version')!r:.80}"))
        results = _of(data, "results", list, path)
        return cls(
            made=_of(data, "made", str, path),
            command=_of(data, "command", str, path),
            system=_of(data, "system", dict, path),
            options=_of(data, "options", dict, path),
            results=tuple(_result(one, path, number) for number, one in enumerate(results)),
        )


def load(path: str | Path) -> BenchFile:
    """:meth:`BenchFile.load`."""
    return BenchFile.load(path)


def save(file: BenchFile, path: str | Path) -> None:
    """:meth:`BenchFile.save`."""
    file.save(path)


_REMEDY = f"expected a file of format {FORMAT!r}, version {VERSION}; make one with: commctl bench --json FILE"


def _message(path: str | Path, got: str) -> str:
    return f"{path}: got {got}; {_REMEDY}"


def _of(data: dict[str, Any], key: str, kind: type, path: str | Path) -> Any:
    value = data.get(key)
    if not isinstance(value, kind):
        raise ArgumentError(_message(path, f"{_named(value)} under {key!r} instead of a {kind.__name__}"))
    return value


def _named(value: object) -> str:
    return "nothing" if value is None else type(value).__name__


_TEXTS = frozenset({"operation", "library", "backend", "way", "dtype", "op", "codec"})
_NUMBERS = frozenset({"time_us", "min_us", "p50_us", "p95_us", "p99_us", "max_us", "algbw_gb_per_s", "busbw_gb_per_s"})
_NAMES = tuple(one.name for one in fields(BenchResult))
# Files of earlier releases lack these.
_ADDED = frozenset(one.name for one in fields(BenchResult) if one.default is not MISSING)


def _result(data: object, path: str | Path, number: int) -> BenchResult:
    if not isinstance(data, dict):
        raise ArgumentError(_message(path, f"{_named(data)} as result {number}"))
    values: dict[str, Any] = {}
    for name in _NAMES:
        if name not in data and name in _ADDED:
            continue
        if name not in data:
            raise ArgumentError(_message(path, f"no {name!r} in result {number}"))
        value = data[name]
        if not _right(name, value):
            raise ArgumentError(_message(path, f"{value!r:.80} as {name!r} of result {number}"))
        values[name] = tuple(float(one) for one in value) if name == "rounds_us" else value
    return BenchResult(**values)


def _right(name: str, value: object) -> bool:
    if name in _TEXTS:
        return isinstance(value, str) and (name != "operation" or operations.is_benchmarked(value))
    if name in _NUMBERS:
        return _number(value)
    if name == "rounds_us":
        return isinstance(value, list) and bool(value) and all(_number(one) for one in value)
    if name == "wrong" and value is None:
        return True
    return isinstance(value, int) and not isinstance(value, bool) and value >= (-1 if name == "root" else 0)


def _number(value: object) -> bool:
    """Return a time or bandwidth: finite and not negative."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
