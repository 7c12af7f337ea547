"""Data made from a known model is recognised; what is not enough is said to be so."""

import random
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from comm_utils import operations
from comm_utils.errors import ArgumentError
from comm_utils.observability.bench_results import BenchFile, BenchResult
from comm_utils.observability.cost_model import Key, Point, Shape, collect, fit_all, held_out
from comm_utils.observability.cost_model.algorithms import candidates
from comm_utils.observability.cost_model.fitting import time_us
from comm_utils.observability.cost_model.pieces import fit_pieces, term_of

SIZES = [8 * 2**i for i in range(22)]


def key(operation="all_reduce", level="intra"):
    return Key(operation, "ours", "gloo", level, "in_place", "float32", "sum")


def made(operation, algorithm, shapes, pieces, noise=0.0, sizes=SIZES, seed=0):
    """Points of ``pieces``: (from size, alpha, beta)."""
    chance = random.Random(seed)
    points = []
    for shape in shapes:
        for size in sizes:
            _, alpha, beta = max(piece for piece in pieces if piece[0] <= size)
            messages, volume, _ = term_of(operation, algorithm, shape, size, None)
            points.append(Point(shape, size, (messages * alpha + volume * beta) * chance.lognormvariate(0, noise)))
    return points


ALPHAS = st.floats(0.1, 1e4)
BETAS = st.floats(1e-6, 1.0)


@given(alpha=ALPHAS, beta=BETAS)
def test_one_line_is_recovered(alpha, beta):
    # Both have to show somewhere.
    assume(alpha > 0.05 * beta * SIZES[0])
    assume(beta * SIZES[-1] > 0.05 * alpha)
    fit = fit_all({key(): made("all_reduce", "ring", [Shape(2)], [(0, alpha, beta)])})[0]
    (piece,) = fit.pieces
    assert piece.assumed
    assert piece.chosen.algorithm == "ring"
    assert piece.chosen.alpha_us == pytest.approx(alpha, rel=1e-3)
    assert piece.chosen.beta_us_per_byte == pytest.approx(beta, rel=1e-3)
    assert fit.residuals.p90 < 1e-3
    assert fit.between_sizes is not None
    assert fit.between_sizes.median < 1e-2
    # Every other algorithm says the same of two ranks.
    for other in piece.alternatives:
        messages, volume, _ = term_of("all_reduce", other.algorithm, Shape(2), 4096, None)
        assert messages * other.alpha_us + volume * other.beta_us_per_byte == pytest.approx(
            2 * alpha + 4096 * beta, rel=1e-3
        )


SIZED = [name for name in operations.benchmarked() if name != "barrier"]
CASES = [(operation, name) for operation in SIZED for name in candidates(operation, "intra")]


@pytest.mark.parametrize(("operation", "algorithm"), CASES)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_algorithm_shows_at_several_world_sizes(operation, algorithm, noise):
    shapes = [Shape(2)] if operation == "send" else [Shape(2), Shape(3), Shape(4), Shape(8)]
    points = made(operation, algorithm, shapes, [(0, 10.0, 1e-3)], noise)
    (piece,) = fit_all({key(operation): points})[0].pieces
    named = {piece.chosen.algorithm, *(one.algorithm for one in piece.alternatives)}
    assert algorithm in named
    assert not piece.assumed
    if piece.chosen.algorithm == algorithm:
        assert piece.chosen.alpha_us == pytest.approx(10, rel=0.03 + 2 * noise)
        assert piece.chosen.beta_us_per_byte == pytest.approx(1e-3, rel=0.03 + 2 * noise)
    else:
        # Two that differ by a factor alone, such as a tree there and back and recursive doubling, cannot be told apart.
        assert noise or algorithm in ("binomial tree", "linear", "direct")


# Of noise that is the same each time: one in thousands looks like another border.
@pytest.mark.parametrize("border", range(5, 17))
@pytest.mark.parametrize("factor", [2.0, 4.5, 20.0])
def test_a_change_of_protocol_becomes_a_border(border, factor):
    at = SIZES[border]
    points = made(
        "all_reduce", "ring", [Shape(2), Shape(4)], [(0, 5.0, 4e-3), (at, 5.0 * factor, 5e-4)], 0.01, seed=border
    )
    pieces = fit_pieces("all_reduce", "intra", points)
    assert 2 <= len(pieces) <= 4
    # Between the sizes on its sides, or one off where the two lines are near each other.
    assert min(abs(piece.from_bytes / (at / 2**0.5) - 1) for piece in pieces[1:]) < 1.1
    errors = [abs(time_us(pieces, "all_reduce", p.shape, p.size_bytes, None) / p.time_us - 1) for p in points]
    assert statistics.median(errors) < 0.05


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2])
def test_noise_costs_no_more_than_itself(noise):
    for seed in range(5):
        points = made("all_reduce", "ring", [Shape(2)], [(0, 20.0, 1e-3)], noise, seed=seed)
        fit = fit_all({key(): points})[0]
        truth = made("all_reduce", "ring", [Shape(2)], [(0, 20.0, 1e-3)])
        errors = [abs(time_us(fit.pieces, "all_reduce", p.shape, p.size_bytes, None) / p.time_us - 1) for p in truth]
        assert statistics.median(errors) < 1.2 * noise
        assert fit.between_sizes is not None
        assert fit.between_sizes.low < 1 < fit.between_sizes.high


def test_held_out_sizes_and_world_sizes_of_a_known_model():
    shapes = [Shape(2), Shape(4), Shape(8)]
    points = {key(): made("all_reduce", "Rabenseifner", shapes, [(0, 10.0, 1e-3)], 0.03)}
    for what, count in (("sizes", 3 * len(SIZES) // 2), ("world-sizes", 3 * len(SIZES))):
        found = held_out(points, what)[key()]
        assert len(found) == count
        assert statistics.median(abs(p.fitted_us / p.measured_us - 1) for p in found) < 0.08


def test_held_out_points_are_not_those_of_the_fit():
    """A size whose time belongs to nothing else is predicted as the others say."""
    points = made("all_reduce", "ring", [Shape(2)], [(0, 10.0, 1e-3)])
    odd = SIZES[7]
    spoiled = [replace(p, time_us=p.time_us * 5) if p.size_bytes == odd else p for p in points]
    (found,) = [p for p in held_out({key(): spoiled}, "sizes")[key()] if p.size_bytes == odd]
    assert found.fitted_us == pytest.approx(found.measured_us / 5, rel=0.05)


@pytest.mark.parametrize(("what", "needed"), [("sizes", "three sizes"), ("world-sizes", "two numbers of ranks")])
def test_too_little_to_hold_out_is_refused(what, needed):
    points = {key(): made("all_reduce", "ring", [Shape(2)], [(0, 10.0, 1e-3)], sizes=[8, 16])}
    with pytest.raises(ArgumentError, match=needed):
        held_out(points, what)


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            Point,
            st.builds(lambda n, m: Shape(n * m, n), st.integers(1, 3), st.integers(1, 4)),
            st.integers(0, 1 << 30),
            st.floats(1e-3, 1e9),
        ),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from(sorted(operations.benchmarked())),
    st.lists(st.integers(0, 1 << 32), min_size=2, max_size=20),
)
def test_whatever_was_measured_predictions_never_fall_with_the_size_and_are_never_negative(points, operation, sizes):
    for level in ("intra", "inter"):
        some = [point for point in points if point.shape.level == level]
        if not some:
            continue
        pieces = fit_pieces(operation, level, some)
        assert pieces[0].from_bytes == 0
        for shape in {Shape(5, 1 if level == "intra" else 5), some[0].shape}:
            times = [time_us(pieces, operation, shape, size, None) for size in sorted(sizes)]
            assert times[0] >= 0
            assert all(later >= one * (1 - 1e-9) for one, later in pairwise(times))


def result(**changes):
    values = {
        **{"operation": "all_reduce", "library": "ours", "backend": "gloo", "way": "in_place", "dtype": "float32"},
        **{"op": "sum", "root": -1, "world_size": 2, "nodes": 1, "groups": 1, "size_bytes": 1024, "count": 256},
        **{"iterations": 20, "time_us": 11.0, "min_us": 9.0, "p50_us": 10.0, "p95_us": 11.0, "p99_us": 12.0},
        **{"max_us": 13.0, "rounds_us": (10.0, 11.0, 99.0), "algbw_gb_per_s": 0.1, "busbw_gb_per_s": 0.1, "wrong": 0},
    }
    return BenchResult(**{**values, **changes})


def collected(*results, statistic="median"):
    return collect([BenchFile("2026-01-01", "commctl bench", results=results)], statistic)


def test_one_point_makes_a_model_that_knows_its_limits():
    (fit,) = fit_all(collected(result()).points)
    assert time_us(fit.pieces, "all_reduce", Shape(2), 1024, None) == pytest.approx(11.0)
    assert fit.between_sizes is None
    assert fit.between_world_sizes is None
    assert fit.sizes_bytes == (1024, 1024)


@pytest.mark.parametrize(("statistic", "time"), [("median", 11.0), ("average", 40.0), ("min", 9.0)])
def test_which_time_is_fitted(statistic, time):
    ((point,),) = collected(result(), statistic=statistic).points.values()
    assert point.time_us == pytest.approx(time)


def test_the_average_of_large_numbers_is_in_range():
    ((point,),) = collected(result(rounds_us=(1e308,) * 3), statistic="average").points.values()
    assert point.time_us == pytest.approx(1e308)


def test_a_barrier_of_no_size_is_all_latency():
    barrier = {"operation": "barrier", "size_bytes": 0, "count": 0, "dtype": "", "op": "", "wrong": None}
    times = [
        result(**barrier, world_size=ranks, rounds_us=(10.0 * steps,)) for ranks, steps in ((2, 1), (4, 2), (8, 3))
    ]
    (fit,) = fit_all(collected(*times).points)
    (piece,) = fit.pieces
    assert (piece.chosen.algorithm, piece.chosen.beta_us_per_byte) == ("recursive doubling", 0)
    assert piece.chosen.alpha_us == pytest.approx(10)


def test_what_cannot_be_used_is_left_out_and_said():
    found = collected(result(), result(wrong=3, size_bytes=2048), result(rounds_us=(0.0,), size_bytes=4096))
    ((point,),) = found.points.values()
    assert point.size_bytes == 1024
    assert [note.split(" results")[0] for note in found.notes] == ["left out: 1", "left out: 1"]


@pytest.mark.parametrize("results", [(), (result(wrong=1),), (result(rounds_us=(0.0,)),)])
def test_nothing_usable_is_refused(results):
    with pytest.raises(ArgumentError, match="without a usable result"):
        collected(*results)


def test_of_groups_at_once_the_fullest_machine_counts():
    found = collected(result(groups=1, rounds_us=(1.0,)), result(groups=2, rounds_us=(2.0,)))
    ((point,),) = found.points.values()
    assert point.time_us == 2.0
    assert "fewer groups" in found.notes[0]


def test_a_thousand_sizes_take_no_minutes():
    sizes = list(range(64, 64 * 1001, 64))
    points = made("all_reduce", "ring", [Shape(2), Shape(4)], [(0, 10.0, 1e-3)], 0.05, sizes=sizes)
    (piece,) = fit_pieces("all_reduce", "intra", points)
    assert piece.chosen.algorithm == "ring"
    assert piece.chosen.alpha_us == pytest.approx(10, rel=0.05)


def test_between_hosts_what_happens_within_is_taken_from_the_fit_within():
    within = {key(): made("all_reduce", "Rabenseifner", [Shape(2), Shape(4)], [(0, 1.0, 1e-4)])}
    inside = fit_all(within)[0].pieces
    points = []
    for size in SIZES:
        messages, volume, offset = term_of("all_reduce", "Rabenseifner", Shape(4, 2), size, inside)
        assert offset > 0
        points.append(Point(Shape(4, 2), size, messages * 30 + volume * 1e-2 + offset))
        messages, volume, _ = term_of("all_reduce", "Rabenseifner", Shape(4, 4), size, inside)
        points.append(Point(Shape(4, 4), size, messages * 30 + volume * 1e-2))
    fits = {fit.key.level: fit for fit in fit_all({**within, key(level="inter"): points})}
    (piece,) = fits["inter"].pieces
    assert piece.chosen.algorithm == "Rabenseifner"
    assert piece.chosen.alpha_us == pytest.approx(30, rel=1e-3)
    assert piece.chosen.beta_us_per_byte == pytest.approx(1e-2, rel=1e-3)
