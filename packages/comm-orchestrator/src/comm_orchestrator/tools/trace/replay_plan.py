"""The plan of a replay, validated before anything starts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from comm_orchestrator.rendezvous.records import format_ranks
from comm_orchestrator.tools.trace.matching import matched
from comm_utils.errors import ArgumentError
from comm_utils.observability.traces import Operation, RankTrace
from comm_utils.observability.traces.alignment import Group, group_of
from comm_utils.reduce_op import parse_reduce_op

if TYPE_CHECKING:
    import torch

__all__ = ["WORLD", "Plan", "plan", "type_of", "without_tags"]

#: The name that the group of all ranks gets.
WORLD = ""
# Libraries whose messages have no tags.
_NO_TAGS = frozenset(("nccl", "xccl"))


@dataclass(frozen=True)
class Plan:
    """A replay: its calls and groups.

    Attributes:
        traces: aligned, with what all their ranks have, and groups named alike on all ranks.
        notes: what is left out or done otherwise, a line each.
    """

    traces: list[RankTrace]
    notes: list[str]

    @property
    def backend(self) -> str:
        """Return the library that was recorded; empty where the ranks' differ or nobody said."""
        found = {trace.backend for trace in self.traces}
        return found.pop() if len(found) == 1 else ""

    @property
    def longest_s(self) -> float:
        """Return the time of the longest single operation."""
        return max((event.duration_ns for trace in self.traces for event in trace.events), default=0) * 1e-9


def plan(traces: Sequence[RankTrace]) -> Plan:
    """Plan the replay of ``traces``, which are aligned.

    Raises:
        ArgumentError: nothing, or not faithfully; says why.
    """
    if not any(trace.events for trace in traces):
        raise ArgumentError("the trace has no operations, so there is nothing to replay")
    kept = matched(traces)
    notes = _notes(traces, kept)
    if not any(trace.events for trace in kept):
        raise ArgumentError("there is nothing to replay: " + "; ".join(notes))
    for trace in kept:
        for operation in {event.operation for event in trace.events}:
            wrong = _wrong(operation, trace.rank)
            if wrong:
                raise ArgumentError(f"{operation.name} on rank {trace.rank} cannot be replayed: {wrong}")
    notes += _methods(kept)
    names = _names(kept)
    return Plan([_renamed(trace, names) for trace in kept], notes)


def without_tags(made: Plan, backend: str) -> Plan:
    """``made`` for a library: where that has no tags, messages go without, if their order allows it.

    Raises:
        ArgumentError: a rank receives messages of another in another order than they are sent in.
    """
    tagged = any(event.operation.tag for trace in made.traces for event in trace.events)
    if not tagged or not any(part.rpartition(":")[2] in _NO_TAGS for part in backend.split(",")):
        return made
    orders: dict[tuple[Group, tuple[int, int], bool], list[int]] = defaultdict(list)
    for trace in made.traces:
        for event in trace.events:
            operation = event.operation
            if operation.pattern.is_message:
                sends = operation.pattern.is_send
                ends = (trace.rank, operation.root) if sends else (operation.root, trace.rank)
                orders[group_of(operation), ends, sends].append(event.sequence)
    for (group, (source, target), _), numbers in list(orders.items()):
        if orders[group, (source, target), True] != numbers:
            raise ArgumentError(
                f"{backend} has no tags, and rank {target} receives the messages of rank {source} in another order "
                "than they are sent in; use --backend gloo"
            )
    known: dict[Operation, Operation] = {}
    traces = []
    for trace in made.traces:
        for event in trace.events:
            known.setdefault(event.operation, replace(event.operation, tag=0))
        events = [replace(event, operation=known[event.operation]) for event in trace.events]
        traces.append(replace(trace, events=events))
    return Plan(traces, [*made.notes, f"{backend} has no tags: messages are sent without, in the same order"])


def _notes(traces: Sequence[RankTrace], kept: Sequence[RankTrace]) -> list[str]:
    lost = {trace.rank: len(trace.events) - len(rest.events) for trace, rest in zip(traces, kept, strict=True)}
    total = sum(lost.values())
    if not total:
        return []
    reasons = []
    cut = [trace.rank for trace in traces if not trace.complete]
    dropped = [trace.rank for trace in traces if trace.dropped]
    if cut:
        reasons.append(f"the recording of {format_ranks(cut)} was cut off")
    if dropped:
        reasons.append(f"{format_ranks(dropped)} dropped events")
    why = f" ({'; '.join(reasons)})" if reasons else ""
    where = format_ranks([rank for rank, number in lost.items() if number])
    plural = total != 1
    return [
        f"{total} of {sum(len(trace.events) for trace in traces)} calls {'are' if plural else 'is'} left out, on "
        f"{where}: other ranks that {'they need' if plural else 'it needs'} have no record of "
        f"{'them' if plural else 'it'}{why}"
    ]


def _methods(kept: Sequence[RankTrace]) -> list[str]:
    """Return a note on calls that were compressed or hierarchical."""
    methods = {event.operation.method for trace in kept for event in trace.events} - {""}
    if not methods:
        return []
    calls = sum(bool(event.operation.method) for trace in kept for event in trace.events)
    return [
        f"{calls} calls were made as {', '.join(sorted(methods))}; they are repeated without compression, and "
        "hierarchical where this world makes them so"
    ]


def _wrong(operation: Operation, rank: int) -> str:
    """Return why it cannot be replayed, or nothing."""
    pattern, W = operation.pattern, operation.world_size
    if pattern.is_empty:
        return ""
    try:
        unit = type_of(operation.dtype).itemsize
    except ArgumentError as error:
        return str(error)
    if pattern.reduces:
        if operation.dtype.startswith("float8"):
            return f"{operation.dtype} cannot be reduced"
        try:
            parse_reduce_op(operation.op or "sum")
        except ArgumentError:
            return f"the reduction {operation.op!r:.40} is unknown"
    parts = W if pattern.whole_array else 1
    if pattern.uneven:
        return _wrong_splits(operation, unit)
    if operation.size_bytes % (unit * parts):
        among = f" on {W} ranks" if parts > 1 else ""
        return f"{operation.size_bytes} bytes are no whole number of {operation.dtype}{among}"
    if pattern.is_message and operation.root == rank:
        return "it is a message to itself"
    return ""


def _wrong_splits(operation: Operation, unit: int) -> str:
    W = operation.world_size
    for splits in (operation.input_splits, operation.output_splits):
        if splits and sum(splits) * unit > operation.size_bytes:
            return f"the splits {list(splits)!r:.60} are more than its {operation.size_bytes} bytes"
    if not operation.input_splits and not operation.output_splits and operation.size_bytes % (unit * W):
        return f"{operation.size_bytes} bytes cannot be split evenly among {W} ranks"
    return ""


def type_of(name: str) -> torch.dtype:
    """Return the dtype of this name.

    Raises:
        ArgumentError: this torch has none.
    """
    import torch

    found = getattr(torch, name, None) if name else None
    if not isinstance(found, torch.dtype):
        raise ArgumentError(f"torch {torch.__version__} has no dtype {name!r:.40}")
    return found


def _names(traces: Sequence[RankTrace]) -> dict[Group, str]:
    """Return new names of the groups of all ranks' traces, so that every rank makes them in the same order."""
    everybody = tuple(range(traces[0].world_size))
    groups = sorted(
        {group_of(event.operation) for trace in traces for event in trace.events},
        key=lambda group: (group[1], group[0]),
    )
    worlds = sorted((name != "0", name) for name, ranks in groups if ranks == everybody)
    world = (worlds[0][1], everybody) if worlds else None
    return {group: WORLD if group == world else f"{number:06d}" for number, group in enumerate(groups)}


def _renamed(trace: RankTrace, names: dict[Group, str]) -> RankTrace:
    known: dict[Operation, Operation] = {}
    events = []
    for event in trace.events:
        operation = event.operation
        if operation not in known:
            known[operation] = replace(operation, group=names[group_of(operation)])
        events.append(replace(event, operation=known[operation]))
    return replace(trace, events=events)
