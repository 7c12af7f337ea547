"""Reads a trace and refuses what is none, so that everything else may rely on what it finds."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from comm_utils.errors import ArgumentError
from comm_utils.observability.comms_logger import OPERATIONS
from comm_utils.observability.traces import Operation, RankTrace
from comm_utils.observability.traces.alignment import aligned
from comm_utils.observability.traces.file import load, path_of

__all__ = ["check", "read"]


def read(folder: Path) -> list[RankTrace]:
    """The traces of all ranks in ``folder``, by rank, on rank 0's clock.

    Raises:
        ArgumentError: it is no trace, or one that contradicts itself.
    """
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise ArgumentError(f"{folder}: got {found}; expected a folder with rank0.jsonl, as start_trace() writes it")
    try:
        traces = load(folder)
    except ArgumentError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArgumentError(f"{folder}: the trace cannot be read: {error!s:.200}") from error
    for place, trace in enumerate(traces):
        path = path_of(folder, place)
        if trace.rank != place:
            raise ArgumentError(f"{path}: got the trace of rank {trace.rank!r:.20}; expected that of rank {place}")
        check(trace, str(path))
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
    """What is wrong with ``operation``, or nothing."""
    ranks, W = operation.ranks, trace.world_size
    if operation.operation not in OPERATIONS:
        return f"operation: got {operation.operation!r:.60}, which is unknown to this version"
    if not _whole((operation.size_bytes, operation.tag, operation.root)) or operation.size_bytes < 0:
        return f"size, tag, root: got {operation.size_bytes!r}, {operation.tag!r}, {operation.root!r}; expected numbers"
    if not isinstance(ranks, tuple) or not _whole(ranks) or len(set(ranks)) != len(ranks):
        return f"ranks: got {ranks!r:.60}; expected a list of different ranks"
    if trace.rank not in ranks or not all(0 <= rank < W for rank in ranks):
        return f"ranks: got {list(ranks)!r:.60}; expected ranks below {W}, {trace.rank} among them"
    if operation.root != -1 and operation.root not in ranks:
        return f"root: got {operation.root}; expected one of the group, {list(ranks)!r:.60}"
    if operation.operation in ("broadcast", "reduce", "gather", "scatter", "send", "isend") and operation.root < 0:
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
