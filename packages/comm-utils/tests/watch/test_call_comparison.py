"""Split sizes differ between ranks by right, so they are compared with what the other ranks expect, now and then."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from comm_utils.flight_recorder import FlightRecorder, RingReader
from comm_utils.flight_recorder.memory import RingMemory
from comm_utils.watch import call_comparison
from comm_utils.watch.call_comparison import CallComparison
from comm_utils.watch.trouble import Trouble
from comm_utils.watch.world_view import WorldView

GROUPS = ("first", "second")
#: Makes one all_to_all_single of both ranks: the group, what each rank sends, what each expects.
Exchange = Callable[[str, list[list[int]], list[list[int]]], None]


@pytest.fixture
def rings() -> tuple[CallComparison, Exchange]:
    """The comparison of rank 0 with rank 1."""
    memories = [RingMemory(64, rank, 2) for rank in range(2)]
    kinds = []
    for memory in memories:
        recorder = FlightRecorder()
        recorder._use(memory)
        indexes = {name: recorder.group_index(name, (0, 1), name, "gloo") for name in GROUPS}
        kinds.append(
            {name: recorder.kind(at, "all_to_all_single", "all_to_all", "int8") for name, at in indexes.items()}
        )

    def exchange(group: str, sent: list[list[int]], received: list[list[int]]) -> None:
        for rank in range(2):
            kind = kinds[rank][group]
            kind.end(kind.begin(0, 0, sent[rank], received[rank]))

    own, other = (RingReader(memory.memory) for memory in memories)
    view = WorldView(0, 2, own)
    view.local.readers = {1: other}
    return CallComparison(view, own, ()), exchange


def found(comparison: CallComparison, own: RingReader) -> dict[str, Trouble]:
    own.refresh()
    return dict(comparison.look())


def test_those_of_every_group_are_compared(rings: tuple[CallComparison, Exchange]) -> None:
    comparison, exchange = rings
    exchange("first", [[1, 2], [3, 4]], [[1, 3], [2, 4]])
    exchange("second", [[1, 2], [3, 4]], [[1, 3], [5, 4]])
    (group,) = seen = found(comparison, comparison._own)
    assert group == "second"
    assert "rank 0 sends 2 elements to rank 1, which expects 5" in seen[group].text


def test_a_comparison_that_was_postponed_is_made_up_for(
    rings: tuple[CallComparison, Exchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison, exchange = rings
    exchange("first", [[1, 2], [3, 4]], [[1, 3], [2, 4]])
    assert not found(comparison, comparison._own)
    exchange("first", [[1, 2], [3, 4]], [[1, 3], [5, 4]])
    assert not found(comparison, comparison._own)
    # No other call follows, as in a job that hangs in this one.
    now = call_comparison.time.monotonic()
    monkeypatch.setattr(call_comparison.time, "monotonic", lambda: now + 1)
    assert set(found(comparison, comparison._own)) == {"first"}
