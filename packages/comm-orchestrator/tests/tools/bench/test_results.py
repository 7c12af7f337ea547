"""From the times of ranks to results."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_orchestrator.tools.bench.plan import Row
from comm_orchestrator.tools.bench.results import Seen, Setting, over_ranks, percentile, summed_up

ROW = Row("all_reduce", "float32", "sum", -1, 250, 1000)
NAN = float("nan")


@pytest.mark.parametrize(("average", "time"), [(0, 3.0), (1, 2.0), (2, 1.0), (3, 3.0)])
def test_over_ranks(average: int, time: float) -> None:
    assert over_ranks(average, [3.0, 1.0, 2.0]) == time
    assert over_ranks(average, [3.0, NAN, 1.0, 2.0]) == time


def test_the_time_is_the_median_of_the_rounds() -> None:
    seen = [Seen(0, [10.0, 40.0, 20.0], []), Seen(2, [30.0, 40.0, 20.0], [])]
    found = summed_up(ROW, "ours", "gloo", "in_place", seen, Setting(2, 1, 1, 20, 1))
    assert found.rounds_us == (20.0, 40.0, 20.0)
    assert (found.time_us, found.min_us, found.max_us, found.wrong) == (20.0, 20.0, 40.0, 2)
    assert found.algbw_gb_per_s == found.busbw_gb_per_s == pytest.approx(1000 / 20e-6 / 1e9)


def test_percentiles_are_of_single_calls_where_there_are_some() -> None:
    seen = [Seen(-1, [50.5], [float(number) for number in range(1, 101)])]
    found = summed_up(ROW, "ours", "gloo", "in_place", seen, Setting(1, 1, 1, 100, 1))
    assert (found.min_us, found.p50_us, found.p95_us, found.p99_us, found.max_us) == (1, 50, 95, 99, 100)
    assert found.wrong is None


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=50), st.floats(0, 1))
def test_a_percentile_is_one_of_the_times_and_as_many_are_below(times: list[float], share: float) -> None:
    ordered = sorted(times)
    found = percentile(ordered, share)
    assert found in ordered
    assert sum(one <= found for one in ordered) >= share * len(ordered)


@given(st.integers(-1, 2**50), st.lists(st.floats(0, 1e9)), st.lists(st.floats(0, 1e9)))
def test_what_is_seen_travels_as_numbers(wrong: int, rounds: list[float], calls: list[float]) -> None:
    seen = Seen(wrong, rounds, calls)
    assert Seen.of(seen.numbers(), len(rounds), len(calls)) == seen
