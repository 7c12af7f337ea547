"""The order of the steps of pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from comm_collectives.hierarchy.algorithms import _Piece, _run
from comm_collectives.hierarchy.between import Between

PLACES = [slice(number, number + 1) for number in range(4)]


class _Step:
    def __init__(self, events: list[str], name: str) -> None:
        self._events, self._name = events, name

    def wait(self) -> bool:
        self._events.append(f"{self._name} over")
        return True


class _Waiting:
    waits = True


def steps(events: list[str], fails_at: int = -1) -> Callable[[slice, bool], _Piece]:
    """Return what begins a piece, and notes its steps."""

    def begin(place: slice, async_op: bool) -> _Piece:
        number = place.start

        def started(name: str, is_async: bool) -> Any:
            events.append(f"{name} {number}")
            return _Step(events, f"{name} {number}") if is_async else None

        def cross() -> Any:
            if number == fails_at:
                raise RuntimeError("the link is gone")
            return started("cross", not async_op)

        return _Piece(
            started("enter", async_op),
            cross,
            lambda leaves_async: started("leave", leaves_async),
            lambda: events.append(f"finish {number}"),
        )

    return begin


def test_the_link_carries_pieces_while_others_enter() -> None:
    events: list[str] = []
    _run(PLACES, steps(events), None)
    assert events.index("enter 1") < events.index("cross 0 over") < events.index("leave 0")
    assert [one for one in events if one.startswith("finish")] == [f"finish {number}" for number in range(4)]
    assert not any(one.startswith(("enter", "leave")) and one.endswith("over") for one in events)


def test_steps_within_the_host_go_on_beside_an_exchange_that_waits() -> None:
    events: list[str] = []
    _run(PLACES, steps(events), cast(Between, _Waiting()))
    for number in range(4):
        order = [f"enter {number}", f"enter {number} over", f"cross {number}", f"leave {number}"]
        order += [f"leave {number} over", f"finish {number}"]
        assert [one for one in events if one in order] == order
    for number in range(3):
        assert events.index(f"enter {number + 1}") < events.index(f"cross {number}")
        assert events.index(f"cross {number + 1}") < events.index(f"leave {number} over")


def test_no_step_begins_after_an_exchange_that_failed() -> None:
    events: list[str] = []
    with pytest.raises(RuntimeError, match="the link is gone"):
        _run(PLACES, steps(events, fails_at=1), cast(Between, _Waiting()))
    assert "leave 1" not in events
    assert "enter 3" not in events


def test_nothing_is_done_without_pieces() -> None:
    events: list[str] = []
    _run([], steps(events), cast(Between, _Waiting()))
    assert events == []
