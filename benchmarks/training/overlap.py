"""How much of the communication went on while the program computed, from a trace."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comm_utils.observability.traces import Event

__all__ = ["Overlap", "overlap_of", "overlap_of_events"]


@dataclass(frozen=True)
class Overlap:
    """A step of one rank, as a mean over steps and ranks, in ms.

    ``communication_ms``: operations from call to completion. ``hidden_ms``: the part of it in which the program was
    free to compute.
    """

    calls: float
    communication_ms: float
    hidden_ms: float

    @property
    def share(self) -> float:
        return self.hidden_ms / self.communication_ms if self.communication_ms else 0.0


def hidden_ns(event: Event) -> int:
    """From the return of an asynchronous call until the program waited, or it was complete."""
    if not event.operation.asynchronous:
        return 0
    until = min((wait.begin_ns for wait in event.waits), default=event.end_ns)
    return max(min(until, event.end_ns) - event.returned_ns, 0)


def overlap_of_events(events: Collection[Event], steps: int) -> Overlap:
    """``steps``: of all ranks together."""
    communication_ns = sum(event.end_ns - event.begin_ns for event in events)
    return Overlap(len(events) / steps, communication_ns / steps / 1e6, sum(map(hidden_ns, events)) / steps / 1e6)


def overlap_of(folder: Path, steps: int) -> Overlap:
    """Of a trace; ``steps``: of each rank."""
    from comm_utils.observability.traces.file import load

    traces = load(folder)
    return overlap_of_events([event for trace in traces for event in trace.events], steps * len(traces))
