"""When a run is slower than an earlier one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_orchestrator.tools.bench.comparison import compare, rendered

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ((10.0, (9.0, 10.0, 11.0)), (12.0, (11.5, 12.0, 13.0)), "slower"),
        # Within the tolerance, though no round overlaps.
        ((10.0, (9.9, 10.0, 10.1)), (10.9, (10.8, 10.9, 11.0)), ""),
        # Beyond the tolerance, but one round of the new run was as fast as one of the old.
        ((10.0, (9.0, 10.0, 11.5)), (12.0, (11.5, 12.0, 13.0)), ""),
        ((12.0, (11.5, 12.0, 13.0)), (10.0, (9.0, 10.0, 11.0)), "faster"),
        ((10.0, (10.0,)), (10.0, (10.0,)), ""),
    ],
)
def test_verdicts(result: Make, bench_file: Make, old: Any, new: Any, verdict: str) -> None:
    found = compare(bench_file(result(*old)), bench_file(result(*new)), 0.1)
    assert [one.verdict for one in found.pairs] == [verdict]
    assert found.failed == (verdict == "slower")
    text = "\n".join(rendered(found, "old.json", 0.1))
    assert f"1 compared, {int(verdict == 'slower')} slower, {int(verdict == 'faster')} faster" in text


TIMES = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=5).map(sorted).map(tuple)


@given(old=TIMES, new=TIMES, tolerance=st.floats(0, 2))
def test_slower_and_faster_are_each_others_reverse(
    old: tuple[float, ...], new: tuple[float, ...], tolerance: float
) -> None:
    from comm_orchestrator.tools.bench.comparison import _verdict
    from comm_utils.observability.bench_results import BenchResult

    def one(rounds: tuple[float, ...]) -> BenchResult:
        time = rounds[len(rounds) // 2]
        rest = (time, rounds[0], time, rounds[-1], rounds[-1], rounds[-1], rounds, 0.0, 0.0, None)
        return BenchResult("barrier", "ours", "gloo", "out_of_place", "", "", -1, 2, 1, 1, 0, 0, 20, *rest)

    forth, back = _verdict(one(old), one(new), tolerance), _verdict(one(new), one(old), tolerance)
    assert (forth, back) in (("", ""), ("slower", "faster"), ("faster", "slower"))
    assert _verdict(one(old), one(old), tolerance) == ""


def test_what_only_one_has_and_what_differs_is_said(result: Make, bench_file: Make) -> None:
    old = bench_file(result(), result(size_bytes=8), result(library="torch", size_bytes=16), ranks=4, torch="2.6")
    new = bench_file(result(), result(size_bytes=64), torch="2.13")
    found = compare(old, new, 0.1)
    lines = rendered(found, "old.json", 0.1)
    assert "# different: ranks: 4 before, 2 now" in lines
    assert "# different: torch: 2.6 before, 2.13 now" in lines
    assert "# only before: ours/gloo all_reduce in_place float32 sum 2 ranks: 8 B" in lines
    assert "# only before: torch/gloo all_reduce in_place float32 sum 2 ranks: 16 B" in lines
    assert "# only now: ours/gloo all_reduce in_place float32 sum 2 ranks: 64 B" in lines
    assert not found.failed


def test_nothing_in_common_is_no_success(result: Make, bench_file: Make) -> None:
    found = compare(bench_file(result(world_size=4), ranks=4), bench_file(result()), 0.1)
    assert found.failed
    assert "# FAILED: the two runs have no result in common" in rendered(found, "old.json", 0.1)
