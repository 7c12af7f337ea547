"""Recorded communication: events, the files that hold them, and what they say about who waited for whom."""

from comm_utils.observability.traces.events import Event, Operation, RankTrace, Wait

__all__ = ["Event", "Operation", "RankTrace", "Wait"]
