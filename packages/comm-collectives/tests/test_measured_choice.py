"""Choosing a way by measuring it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from comm_collectives import measured_choice
from comm_collectives.measured_choice import least_faster_size
from comm_utils.backend import Backend

SIZES = (1, 2, 4, 8)


class _Alone:
    """The backend of a group of one rank, whose times are the slowest."""

    def all_reduce(self, *_: object) -> None: ...

    def barrier(self, *_: object) -> None: ...


class _Clock:
    """Time that passes in calls alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def passing(self, seconds: Iterator[float]) -> Callable[[], None]:
        def call() -> None:
            self.now += next(seconds)

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


def chosen(clock: _Clock, second: Callable[[int], list[float]], **options: Any) -> tuple[int | None, list[int]]:
    """Return the choice beside a way that takes 1 ms, and the sizes that were measured."""
    measured = []

    def repeated(some: list[float]) -> Iterator[float]:
        while True:
            yield from some

    def make(size: int) -> tuple[Callable[[], None], Callable[[], None]]:
        measured.append(size)
        return clock.passing(repeated([1e-3])), clock.passing(repeated(second(size)))

    return least_faster_size(cast(Backend, _Alone()), None, SIZES, make, **options), measured


def test_the_size_from_which_on_it_is_faster(clock: _Clock) -> None:
    assert chosen(clock, lambda size: [2e-3 / size]) == (4, [*SIZES])
    assert chosen(clock, lambda _: [2e-3]) == (None, [*SIZES])


def test_a_gain_that_is_too_small_is_none(clock: _Clock) -> None:
    assert chosen(clock, lambda _: [0.95e-3], at_most=0.9)[0] is None
    assert chosen(clock, lambda _: [0.85e-3], at_most=0.9)[0] == 1


def test_it_has_to_be_faster_at_best_and_in_the_median(clock: _Clock) -> None:
    assert chosen(clock, lambda _: [0.1e-3, 1.5e-3, 1.5e-3])[0] is None
    clock.now = 0
    assert chosen(clock, lambda _: [0.1e-3, 0.5e-3, 1.5e-3])[0] == 1


def test_a_larger_size_at_which_it_is_slower_forgets_smaller_ones(clock: _Clock) -> None:
    assert chosen(clock, lambda size: [0.5e-3 if size < 8 else 2e-3]) == (None, [*SIZES])


def test_what_stays_faster_is_measured_at_two_sizes(clock: _Clock) -> None:
    assert chosen(clock, lambda size: [0.5e-3 if size > 1 else 2e-3], stays_faster=True) == (2, [1, 2, 4])


def test_calls_that_take_long_are_measured_least(clock: _Clock) -> None:
    calls = 0

    def long(size: int) -> list[float]:
        nonlocal calls
        calls += 1
        return [0.11]

    assert chosen(clock, long) == (None, [1])
    assert calls == 1
    rounds = clock.now / 0.111
    assert rounds == pytest.approx(1 + measured_choice._ROUNDS[0], abs=0.1)
