"""How two ranks exchange encoded pieces follows from the times of earlier calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from comm_collectives.compression import pace

KEY = ("onebit", 24)


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    pace.forget()
    yield
    pace.forget()


def is_slow() -> bool:
    """Return whether the two ways are measured, which they are on slow links alone."""
    return pace.choose(None, KEY).measured


def note_slow_link() -> None:
    pace.note(None, KEY, 10 << 20, waited_s=1.0, took_s=1.1)


def messages_of(calls: int, took_s: Callable[[bool], float]) -> list[bool]:
    """Return whether each of so many calls used messages, on a slow link where calls take ``took_s(messages)``."""
    found = []
    for _ in range(calls):
        messages, measured = pace.choose(None, KEY)
        took = took_s(messages)
        pace.note(None, KEY, 10 << 20, took, took, messages if measured else None)
        found.append(messages)
    return found


def test_a_link_is_slow_where_ranks_wait_for_what_they_receive() -> None:
    assert not is_slow()
    note_slow_link()
    assert is_slow()
    pace.note(None, KEY, 1000, waited_s=0.0, took_s=0.0)  # too little to tell
    assert is_slow()
    pace.note(None, KEY, 10 << 20, waited_s=0.01, took_s=1.1)  # it may have come while the rank computed
    assert is_slow()
    pace.note(None, KEY, 10 << 20, waited_s=0.01, took_s=0.02)
    assert not is_slow()


def test_fast_links_carry_collectives_and_nothing_is_measured() -> None:
    assert {pace.choose(None, KEY) for _ in range(200)} == {pace.Choice(messages=False, measured=False)}


@pytest.mark.parametrize("faster", [False, True])
def test_the_faster_way_is_used_once_both_were_measured(faster: bool) -> None:
    note_slow_link()
    found = messages_of(320, lambda messages: 0.1 if messages == faster else 0.14)
    assert found[:4] == [False, True, False, True]
    assert set(found[4:64]) == {faster}
    assert found.count(not faster) <= 2 + 320 // 64


def test_a_way_that_becomes_slower_is_left() -> None:
    note_slow_link()
    assert messages_of(64, lambda messages: 0.1 if messages else 0.14)[-1]
    assert not messages_of(192, lambda messages: 0.2 if messages else 0.14)[-1]


def test_one_slow_call_changes_nothing() -> None:
    note_slow_link()
    assert messages_of(65, lambda messages: 0.1 if messages else 0.14)[-2]
    times = iter([5.0, *[0.1] * 100])
    assert messages_of(60, lambda messages: next(times) if messages else 0.14)[-1]


def test_compressions_and_sizes_are_measured_apart() -> None:
    note_slow_link()
    messages_of(10, lambda messages: 0.1 if messages else 0.14)
    assert not pace.choose(None, KEY).measured
    assert pace.choose(None, ("int8", 24)).measured
    assert pace.choose(None, ("onebit", 20)).measured


def test_ranks_that_measured_other_times_still_measure_in_the_same_calls() -> None:
    measured = []
    for faster in (False, True):
        pace.forget()
        note_slow_link()
        chosen = []
        for _ in range(300):
            messages, measures = pace.choose(None, KEY)
            # The other rank does not want messages, but where both measure.
            used = messages if measures else False
            pace.note(None, KEY, 10 << 20, 1.0, 1.0 if used == faster else 1.4, used if measures else None)
            chosen.append(measures)
        measured.append(chosen)
    assert measured[0] == measured[1]
