"""Read recorded traces, and write one Chrome trace of all ranks."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from comm_utils import operations
from comm_utils.atomic_write import replacing_binary
from comm_utils.errors import ArgumentError
from comm_utils.observability.traces import Event, Operation, RankTrace
from comm_utils.observability.traces.alignment import aligned
from comm_utils.observability.traces.chrome import write
from comm_utils.observability.traces.file import belongs_to, load, path_of
from comm_utils.observability.traces.waiting import divided

__all__ = ["check", "check_output", "merge", "read", "waiting_of"]


def read(folder: Path) -> list[RankTrace]:
    """Return the traces of all ranks in ``folder``, by rank, on rank 0's clock.

    Raises:
        ArgumentError: it is no trace, or one that contradicts itself.
    """
    if not folder.is_dir():
        found = "got a file" if folder.exists() else "there is no such folder"
        raise ArgumentError(f"{folder}: {found}; expected a folder with rank0.jsonl, which start_trace() writes")
    try:
        traces = load(folder)
    except OSError as error:
        raise ArgumentError(f"{folder}: the trace cannot be read: {error!s:.200}") from error
    for trace in traces:
        check(trace, str(path_of(folder, trace.rank)))
    return aligned(traces)


def check(trace: RankTrace, where: str) -> None:
    """Raise where ``trace`` contradicts itself.

    Raises:
        ArgumentError: says what, and that it is in ``where``.
    """
    if not isinstance(trace.world_size, int) or trace.world_size < 1:
        raise ArgumentError(f"{where}: world_size: got {trace.world_size!r:.20}; expected a number of ranks")
    clocks = (trace.offset_ns, trace.offset_at_ns, trace.drift, trace.uncertainty_ns, trace.dropped)
    if not all(isinstance(value, (int, float)) for value in clocks):
        raise ArgumentError(f"{where}: got {clocks} as the clock and what was dropped; expected numbers")
    for operation in {event.operation for event in trace.events}:
        wrong = _wrong(operation, trace)
        if wrong:
            raise ArgumentError(f"{where}: {str(operation.name)[:60]}: {wrong}")
    for event in trace.events:
        times = (event.begin_ns, event.returned_ns, event.end_ns)
        if type(event.sequence) is not int or not all(type(time) is int for time in times):
            raise ArgumentError(f"{where}: got {event.sequence!r:.20}, {times}; expected whole numbers")
        if event.end_ns < event.begin_ns or event.returned_ns < event.begin_ns:
            raise ArgumentError(f"{where}: {event.operation.name} ends before it begins, at {event.begin_ns} ns")
        for wait in event.waits:
            if type(wait.begin_ns) is not int or type(wait.end_ns) is not int or wait.end_ns < wait.begin_ns:
                raise ArgumentError(f"{where}: got the wait {wait}; expected that it ends after it begins")


def _wrong(operation: Operation, trace: RankTrace) -> str:
    """Return the problem with ``operation``; empty if there is none."""
    ranks, W = operation.ranks, trace.world_size
    row = operations.find(operation.operation) if isinstance(operation.operation, str) else None
    if row is None or not row.recorded:
        return f"operation: got {operation.operation!r:.60}, which is unknown to this version"
    if not _whole((operation.size_bytes, operation.tag, operation.root)) or operation.size_bytes < 0:
        got = f"{operation.size_bytes!r}, {operation.tag!r}, {operation.root!r}"
        return f"size, tag, root: got {got}; expected whole numbers, a size of at least 0"
    if not isinstance(ranks, tuple) or not _whole(ranks) or len(set(ranks)) != len(ranks):
        return f"ranks: got {ranks!r:.60}; expected a list of different ranks"
    if trace.rank not in ranks or not all(0 <= rank < W for rank in ranks):
        return f"ranks: got {list(ranks)!r:.60}; expected ranks below {W}, {trace.rank} among them"
    if operation.root != -1 and operation.root not in ranks:
        return f"root: got {operation.root}; expected one of the group, {list(ranks)!r:.60}"
    if (row.pattern.is_rooted or row.pattern.is_send) and operation.root < 0:
        return "root: missing"
    for splits in (operation.input_splits, operation.output_splits):
        if not isinstance(splits, tuple) or not _whole(splits) or (splits and len(splits) != len(ranks)):
            return f"splits: got {splits!r:.60}; expected one for each of the {len(ranks)} ranks"
        if any(one < 0 for one in splits):
            return f"splits: got {splits!r:.60}; expected no negative ones"
    texts = (operation.name, operation.group, operation.dtype, operation.op, operation.caller)
    if not all(isinstance(text, str) for text in texts):
        return f"got {texts!r:.60}; expected texts"
    return ""


def _whole(values: Iterable[object]) -> bool:
    return all(type(value) is int for value in values)


def check_output(option: str, output: Path, folder: Path) -> None:
    """Refuse to write a file of the trace in ``folder``, which is what is read.

    Raises:
        ArgumentError: names the option.
    """
    if belongs_to(folder, output):
        raise ArgumentError(f"{option}: {output} is a file of the trace that is read; expected another name")


def merge(traces: Sequence[RankTrace], path: Path) -> None:
    """Write ``traces``, which are aligned, to ``path``; compressed where that ends with ``.gz``.

    Raises:
        ArgumentError: nothing can be written there.
        OSError: the file cannot be written to its end.
    """
    with replacing_binary(path) as binary, _as_text(binary, compressed=path.suffix == ".gz") as file:
        write(file, traces, _more(traces))


def _as_text(binary: BinaryIO, compressed: bool) -> TextIO:
    if compressed:
        return cast(TextIO, gzip.open(binary, "wt", encoding="utf-8"))
    return TextIOWrapper(binary, encoding="utf-8")


def waiting_of(traces: Sequence[RankTrace]) -> dict[int, tuple[int, int]]:
    """Return how long each event waited, ns, and for which rank, by the ``id`` of the event."""
    return {id(calls[rank]): waited for calls, found in divided(traces) for rank, waited in found.items()}


def _more(traces: Sequence[RankTrace]) -> Callable[[int, Event], Mapping[str, Any]]:
    waited = waiting_of(traces)

    def more(rank: int, event: Event) -> Mapping[str, Any]:
        found = waited.get(id(event))
        if found is None:
            return {}
        waiting_ns, waited_for = found
        said = {"waiting_us": waiting_ns / 1000, "transfer_us": (event.duration_ns - waiting_ns) / 1000}
        return {**said, "waited_for_rank": waited_for} if waiting_ns else said

    return more
