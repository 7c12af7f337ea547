"""Trace files: one a rank, JSON lines, written as operations end.

A line is one of

* ``{"format": "comm-trace", "version": 1, ...}``, the first: the fields of :class:`RankTrace` but its events;
* ``{"number": number, ...}``: the fields of :class:`Operation`, before the first event that refers to it by number;
* ``[number, sequence, begin_ns, end_ns]``: a synchronous operation;
* ``[number, sequence, begin_ns, end_ns, returned_ns]``: an asynchronous one;
* either with an object at the end: fields of :class:`Operation` that this event has instead of the operation's;
* ``[begin_ns, wait_begin_ns, wait_end_ns]``: somebody waited for the asynchronous operation of this ``begin_ns``;
* ``{"end": true, ...}``, the last where the recording was ended: fields of :class:`RankTrace` known only then.

Times are nanoseconds on the rank's own monotonic clock.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from comm_utils.errors import ArgumentError
from comm_utils.json_files import parse, read_lines
from comm_utils.observability.traces.events import Event, Operation, RankTrace, Wait
from comm_utils.observability.traces.lines import header_fields, integers, operation_fields

__all__ = ["FORMAT", "VERSION", "TraceWriter", "belongs_to", "load", "load_rank", "path_of", "remove_beyond", "save"]

FORMAT, VERSION = "comm-trace", 1
_NAME = re.compile(r"rank(0|[1-9][0-9]{0,17})\.jsonl")
_HEADER = {one.name for one in fields(RankTrace)} - {"events"}
# How many files or numbers an error names.
_NAMED = 8


def path_of(folder: Path | str, rank: int) -> Path:
    """Return the path of the trace of ``rank``."""
    return Path(folder) / f"rank{rank}.jsonl"


def belongs_to(folder: Path | str, path: Path | str) -> bool:
    """Return whether the trace in ``folder`` has, or would have, a file at ``path``, whatever links lead there."""
    target = os.path.realpath(path)
    if os.path.dirname(target) == os.path.realpath(folder) and _NAME.fullmatch(os.path.basename(target)):
        return True
    return target in map(os.path.realpath, _files_of(folder).values())


def _files_of(folder: Path | str) -> dict[int, Path]:
    """Return the files of the trace in ``folder``, by rank; none where there is no such folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {int(match[1]): Path(folder, name) for name in names if (match := _NAME.fullmatch(name))}


class TraceWriter:
    """Writes the file of one rank; callers see to it that one thread writes at a time.

    Attributes:
        under_way: operations that have begun and are not written; those that are so at the end are dropped.
    """

    def __init__(self, folder: Path | str, rank: int) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.path = path_of(folder, rank)
        self.under_way = 0
        # An earlier trace stays until this one begins.
        self._beginning = self.path.with_suffix(".begins")
        self._file: TextIO = self._beginning.open("w", encoding="utf-8")
        self.write, self.flush = self._file.write, self._file.flush

    def begin(self, trace: RankTrace) -> None:
        """Write the first line, and take the place of whatever was there."""
        self._line({"format": FORMAT, "version": VERSION, **_header(trace)})
        self._file.flush()
        self._beginning.replace(self.path)

    def define(self, number: int, operation: Operation) -> None:
        """``operation`` is ``number`` in the events to come."""
        self._line({**asdict(operation), "number": number})

    def _line(self, found: dict[str, Any]) -> None:
        self.write(json.dumps(found, separators=(",", ":")) + "\n")

    def close(self, **known: Any) -> None:
        """End the recording.

        Args:
            known: fields of :class:`RankTrace`.
        """
        self._line({"end": True, "dropped": self.under_way, **known})
        self._file.close()

    def abandon(self) -> None:
        """Close the file, whatever becomes of what was not yet written; one that has not begun goes."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._beginning.unlink()

    def detach(self) -> None:
        """In a forked child: write nothing of what the parent has still to write."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)


def remove_beyond(folder: Path | str, world_size: int) -> None:
    """Remove the files of ranks that a world of this size does not have, left by a larger one."""
    for rank, path in _files_of(folder).items():
        if rank >= world_size:
            path.unlink()


def _header(trace: RankTrace) -> dict[str, Any]:
    return {name: getattr(trace, name) for name in sorted(_HEADER) if name not in ("complete", "dropped")}


def save(folder: Path | str, trace: RankTrace) -> Path:
    """Write the whole of ``trace``, whose times are on the rank's own clock."""
    writer = TraceWriter(folder, trace.rank)
    writer.begin(trace)
    numbers: dict[Operation, int] = {}
    for event in trace.events:
        if event.operation not in numbers:
            numbers[event.operation] = len(numbers)
            writer.define(numbers[event.operation], event.operation)
        line = [numbers[event.operation], event.sequence, event.begin_ns, event.end_ns]
        writer.write(json.dumps([*line, event.returned_ns] if event.operation.asynchronous else line) + "\n")
        for wait in event.waits:
            writer.write(json.dumps([event.begin_ns, wait.begin_ns, wait.end_ns]) + "\n")
    writer.close(dropped=trace.dropped)
    return writer.path


def load(folder: Path | str) -> list[RankTrace]:
    """Return the traces of all ranks that ``folder`` has, by rank.

    Raises:
        ArgumentError: it has none, lacks some, or they are of several jobs or of another format.
        OSError: a file cannot be read.
    """
    found = _files_of(folder)
    if not found:
        raise ArgumentError(f"{folder}: no trace here; expected a folder with rank0.jsonl, as start_trace() writes it")
    groups: dict[tuple[int, ...], tuple[int, ...]] = {}
    traces = [load_rank(found[rank], groups) for rank in sorted(found)]
    for rank, trace in zip(sorted(found), traces, strict=True):
        if trace.rank != rank:
            raise ArgumentError(f"{found[rank]}: got the trace of rank {trace.rank}; expected that of rank {rank}")
    sizes = sorted({trace.world_size for trace in traces})
    if len(sizes) > 1:
        raise ArgumentError(f"{folder}: traces of several jobs, of {_listed(sizes)} ranks; remove the old")
    jobs = {trace.job: trace.rank for trace in traces}
    if len(jobs) > 1:
        first, second = sorted(jobs.values())[:2]
        raise ArgumentError(
            f"{folder}: the files of ranks {first} and {second} are of different jobs; copy those of one job into an "
            "empty folder"
        )
    if beyond := [rank for rank in found if rank >= sizes[0]]:
        raise ArgumentError(f"{found[min(beyond)]}: got a file of rank {min(beyond)}; expected ranks below {sizes[0]}")
    if len(found) < sizes[0]:
        # The number of ranks is what a file claims: nothing here may take time in proportion to it.
        missing = islice((rank for rank in range(sizes[0]) if rank not in found), _NAMED + 1)
        raise ArgumentError(
            f"{folder}: got {len(found)} of {sizes[0]} ranks' files; missing: "
            f"{_listed([f'rank{rank}.jsonl' for rank in missing])}; each host keeps those of its own ranks: copy them "
            "here"
        )
    return traces


def _listed(names: Sequence[object]) -> str:
    return ", ".join([*map(str, names[:_NAMED]), *(["..."] if len(names) > _NAMED else [])])


def load_rank(path: Path | str, groups: dict[tuple[int, ...], tuple[int, ...]] | None = None) -> RankTrace:
    """Return the trace in one file; the last line may have been cut off.

    Args:
        groups: the ranks of the groups in files that were loaded before; those of this file are added. Equal ones are
            shared, so that they are compared and kept once, not once a rank.

    Raises:
        ArgumentError: it is no trace, or of another version; names the file and the line.
        OSError: it cannot be read.
    """
    lines = read_lines(path)
    trace = _first_line(path, lines)
    operations: dict[int, Operation] = {}
    pending: dict[int, Event] = {}
    early: dict[int, list[Wait]] = {}  # a wait may be written before the end of its operation
    for number, line, whole in lines:
        where = f"{path}, line {number}"
        try:
            found = parse(line, where)
            if isinstance(found, list):
                _event(found, trace.events, operations, pending, early)
            elif found.get("end"):
                trace.complete = True
                for name, value in header_fields(found).items():
                    setattr(trace, name, value)
            else:
                key = integers([found.pop("number")])[0]
                values = operation_fields(found)
                if groups is not None and "ranks" in values:
                    values["ranks"] = groups.setdefault(values["ranks"], values["ranks"])
                operations[key] = Operation(**values)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            if not whole:
                break  # the process ended while it wrote
            reason = _reason(error, where)
            raise ArgumentError(f"{where}: not a line of a trace: {reason}: {line.strip()[:80]!r}") from None
    _check_size(path, trace)
    trace.events.sort(key=lambda event: event.begin_ns)
    return trace


def _reason(error: Exception, where: str) -> str:
    """Describe in a few words what is wrong with a line."""
    if isinstance(error, LookupError):
        return f"it refers to {error}, which no earlier line defines" if error.args else "values are missing"
    if isinstance(error, ArgumentError):
        return str(error).removeprefix(f"{where}: ")
    return str(error) if type(error) is ValueError else "values are missing, or there are too many"


def _first_line(path: Path | str, lines: Iterator[tuple[int, str, bool]]) -> RankTrace:
    expected = f"its first line is not that of the format {FORMAT!r}"
    try:
        _, line, _ = next(lines)
        header = parse(line, f"{path}, line 1")
    except StopIteration:
        raise ArgumentError(f"{path}: not a trace: {expected}, as it is empty") from None
    except ArgumentError as error:
        raise ArgumentError(f"{path}: not a trace: {expected}: {error}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ArgumentError(f"{path}: not a trace: {expected}")
    if header.get("version") != VERSION:
        got = header.get("version")
        raise ArgumentError(
            f"{path}, line 1: got version {got!r:.60} of the format, expected {VERSION}; read it with the release of "
            "comm-utils that wrote it"
        )
    try:
        trace = RankTrace(**{**header_fields(header), "complete": False})
    except TypeError:
        raise ArgumentError(f"{path}, line 1: got no rank or no world_size; expected both") from None
    except ValueError as error:
        raise ArgumentError(f"{path}, line 1: {error}") from None
    _check_size(path, trace)
    return trace


def _check_size(path: Path | str, trace: RankTrace) -> None:
    if trace.world_size < 1:
        raise ArgumentError(f"{path}: world_size: got {trace.world_size}; expected a number of ranks")


def _event(
    found: list[Any],
    events: list[Event],
    operations: dict[int, Operation],
    pending: dict[int, Event],
    early: dict[int, list[Wait]],
) -> None:
    if len(found) == 3:
        begin, *wait = integers(found)
        event = pending.get(begin)
        (early.setdefault(begin, []) if event is None else event.waits).append(Wait(*wait))
        return
    changes = found.pop() if found and isinstance(found[-1], dict) else None
    key, sequence, begin, end, *returned = integers(found)
    if len(returned) > 1:
        raise ValueError(f"got {len(found)} numbers; expected at most 5")
    operation = operations[key] if changes is None else replace(operations[key], **operation_fields(changes))
    event = Event(operation, sequence, begin, end, returned[0] if returned else end)
    if returned:
        event.waits.extend(early.pop(begin, ()))
        pending[begin] = event
    events.append(event)
