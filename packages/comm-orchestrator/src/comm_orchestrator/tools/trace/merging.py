"""One Chrome trace of all ranks."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from comm_orchestrator.tools.trace.output import replaced
from comm_utils.observability.traces import Event, RankTrace
from comm_utils.observability.traces.chrome import write
from comm_utils.observability.traces.waiting import split, together

__all__ = ["merge", "waiting_of"]


def merge(traces: Sequence[RankTrace], path: Path) -> None:
    """Write ``traces``, which are aligned, to ``path``; compressed where that ends with ``.gz``.

    Raises:
        ArgumentError: nothing can be written there.
    """
    with replaced(path) as place, _opened(place, compressed=path.suffix == ".gz") as file:
        write(file, traces, _more(traces))


def _opened(path: Path, compressed: bool) -> TextIO:
    return cast(TextIO, gzip.open(path, "wt", encoding="utf-8") if compressed else path.open("w", encoding="utf-8"))


def waiting_of(traces: Sequence[RankTrace]) -> dict[int, tuple[int, int]]:
    """How long each event waited, ns, and for which rank, by the ``id`` of the event."""
    return {id(calls[rank]): waited for calls in together(traces) for rank, waited in split(calls).items()}


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
