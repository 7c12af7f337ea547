"""Predictions of what was measured, and held out: files of ``commctl bench``, whose commands stand in them.

``shared-memory-2-ranks.json``: two ranks on one host. ``gloo-100mbit-*-ranks.json``: 2, 4 and 6 ranks on two hosts,
started by torchrun, over a link that tc's tbf shapes to 100 Mbit/s, as in tests-integration/launchers.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

import pytest

from comm_utils.observability import bench_results
from comm_utils.observability.cost_model import FittedPoint, Key, Point, collect, fit_all, held_out

FOLDER = Path(__file__).resolve().parent / "measured"


def points(name: str) -> dict[Key, list[Point]]:
    return collect(map(bench_results.load, sorted(FOLDER.glob(name)))).points


def median_error(found: Iterable[FittedPoint]) -> float:
    return statistics.median(abs(one.fitted_us - one.measured_us) / one.measured_us for one in found)


@pytest.mark.parametrize("name", ["shared-memory-*.json", "gloo-100mbit-*.json"])
def test_held_out_sizes_are_within_a_fifth(name: str) -> None:
    found = held_out(points(name), "sizes")
    assert sum(map(len, found.values())) >= 20
    assert median_error(one for some in found.values() for one in some) < 0.1
    for key, some in found.items():
        assert median_error(some) < 0.2, key


def test_held_out_world_sizes_over_a_link_are_within_a_fifth() -> None:
    found = held_out(points("gloo-100mbit-*.json"), "world-sizes")
    assert len(found) >= 4
    for key, some in found.items():
        assert {one.shape.ranks for one in some} == {2, 4, 6}
        assert median_error(some) < 0.2, key


def test_the_algorithm_of_gloo_and_the_rate_of_the_link_are_found() -> None:
    fits = {fit.key.operation: fit for fit in fit_all(points("gloo-100mbit-*.json")) if fit.key.way == "in_place"}
    for operation in ("all_reduce", "all_gather_into_tensor"):
        (piece,) = fits[operation].pieces
        # gloo's are rings, as its sources say; TCP carries 94 to 96 % of what the link does.
        assert piece.chosen.algorithm == "ring"
        assert 85 < 8e-3 / piece.chosen.beta_us_per_byte * 1e3 < 100
