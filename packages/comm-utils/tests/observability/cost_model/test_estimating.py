"""Predictions of one operation: which fit, which network, how sure."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_utils import operations
from comm_utils.errors import ArgumentError
from comm_utils.observability.cost_model import (
    Estimator,
    Key,
    Link,
    Model,
    NoFitError,
    Point,
    Shape,
    fit_all,
    parse_link,
)
from comm_utils.observability.cost_model.algorithms import candidates
from comm_utils.observability.cost_model.model import load, save
from comm_utils.observability.cost_model.pieces import term_of

SIZES = [8 * 4**i for i in range(11)]


def points(
    operation: str, algorithm: str, shapes: list[Shape], alpha: float, beta: float, sizes: list[int] = SIZES
) -> list[Point]:
    found = []
    for shape in shapes:
        for size in sizes:
            messages, volume, _ = term_of(operation, algorithm, shape, size, None)
            found.append(Point(shape, size, messages * alpha + volume * beta))
    return found


def key(operation: str = "all_reduce", level: str = "intra", dtype: str = "float32", library: str = "ours") -> Key:
    way = "in_place" if operation == "all_reduce" else "out_of_place"
    return Key(operation, library, "gloo", level, way, dtype, "sum" if operation == "all_reduce" else "")


def model(some: dict[Key, list[Point]], link: Link | None = None) -> Model:
    return Model("2026-01-01", "commctl fit", "median", tuple(fit_all(some)), link=link)


WITHIN = points("all_reduce", "ring", [Shape(2), Shape(4)], 2.0, 1e-4)


def test_what_was_measured_is_predicted_with_an_interval_around_it() -> None:
    found = Estimator(model({key(): WITHIN})).estimate("all_reduce", 8192, Shape(4), "float32", "sum")
    assert found.time_us == pytest.approx(6 * 2 + 1.5 * 8192 * 1e-4)
    assert found.low_us < found.time_us < found.high_us < 1.1 * found.time_us
    assert (found.algorithm, found.marks) == ("ring", frozenset())


@pytest.mark.parametrize(
    ("size", "shape", "dtype", "mark"),
    [
        (1 << 40, Shape(4), "float32", "size"),
        (1, Shape(4), "float32", "size"),
        (8192, Shape(64), "float32", "ranks"),
        (8192, Shape(3), "float32", "ranks"),
        (8192, Shape(4), "bfloat16", "dtype"),
    ],
)
def test_beyond_what_was_measured_it_is_marked_and_never_surer(size: int, shape: Shape, dtype: str, mark: str) -> None:
    estimator = Estimator(model({key(): WITHIN}))
    sure = estimator.estimate("all_reduce", 8192, Shape(4), "float32", "sum")
    found = estimator.estimate("all_reduce", size, shape, dtype, "sum")
    assert mark in found.marks
    assert found.high_us / found.low_us >= sure.high_us / sure.low_us * (1 - 1e-9)


def test_each_doubling_beyond_adds_to_the_interval() -> None:
    estimator = Estimator(model({key(): WITHIN}))
    widths = [
        found.high_us / found.low_us
        for ranks in (4, 8, 16, 32)
        if (found := estimator.estimate("all_reduce", 8192, Shape(ranks), "float32", "sum"))
    ]
    assert widths == sorted(widths)
    assert widths[-1] > 3 * widths[0]


def test_an_assumed_algorithm_spans_the_others_at_other_world_sizes() -> None:
    estimator = Estimator(model({key(): points("all_reduce", "ring", [Shape(2)], 2.0, 1e-4)}))
    found = estimator.estimate("all_reduce", 1 << 20, Shape(16), "float32", "sum")
    assert "algorithm" in found.marks
    # Of two ranks ring and recursive doubling take the same; of 16, their bandwidth terms differ by 4 / (15 / 8).
    assert found.high_us > 4 / 2 * found.time_us
    assert "algorithm" not in estimator.estimate("all_reduce", 1 << 20, Shape(2), "float32", "sum").marks


def test_the_nearest_fit_is_used() -> None:
    slow = points("all_reduce", "ring", [Shape(2), Shape(4)], 20.0, 1e-3)
    estimator = Estimator(model({key(): WITHIN, key(dtype="bfloat16"): slow}))
    fast_us = estimator.estimate("all_reduce", 8192, Shape(4), "float32", "sum").time_us
    assert estimator.estimate("all_reduce", 8192, Shape(4), "bfloat16", "sum").time_us == pytest.approx(10 * fast_us)


@pytest.mark.parametrize("name", ["inference_all_reduce", "all_reduce_coalesced"])
def test_operations_go_by_what_they_were_measured_as(name: str) -> None:
    estimator = Estimator(model({key(): WITHIN}))
    expected = estimator.estimate("all_reduce", 8192, Shape(4), "float32", "sum")
    assert estimator.estimate(name, 8192, Shape(4), "float32", "sum") == expected


def test_one_rank_without_a_measurement_is_free_and_says_so() -> None:
    found = Estimator(model({key(): WITHIN})).estimate("all_reduce", 8192, Shape(1))
    assert (found.time_us, found.marks) == (0.0, frozenset(["free"]))


def test_what_no_fit_can_tell_is_refused() -> None:
    estimator = Estimator(model({key(): WITHIN}))
    with pytest.raises(NoFitError, match=r"no fit of broadcast within a host.*commctl bench broadcast"):
        estimator.estimate("broadcast", 8, Shape(2))
    with pytest.raises(NoFitError, match=r"no fit of all_reduce between hosts.*--network"):
        estimator.estimate("all_reduce", 8, Shape(4, 2))


def test_libraries_are_not_mixed_up() -> None:
    slow = points("all_reduce", "ring", [Shape(2)], 20.0, 1e-3)
    both = model({key(): WITHIN, key(library="torch"): slow})
    with pytest.raises(ArgumentError, match="several libraries: ours/gloo, torch/gloo; name one with --library"):
        Estimator(both)
    with pytest.raises(ArgumentError, match="no fit of ours/nccl; it has: ours/gloo, torch/gloo"):
        Estimator(both, "ours", "nccl")
    assert Estimator(both, "torch").library == "torch"


LINK = Link(5.0, 8e-5)  # 100 Gbit/s


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (4, 1), (2, 4), (8, 8)])
def test_over_a_given_network_the_ring_goes_as_fast_as_its_slowest_part(nodes: int, per_node: int) -> None:
    ranks = nodes * per_node
    found = Estimator(model({key(): WITHIN}), network=LINK).estimate("all_reduce", 1 << 22, Shape(ranks, nodes))
    # Software costs 2 µs a message and 1e-4 µs a byte, so that a faster link changes nothing but the latency.
    assert found.time_us == pytest.approx(2 * (ranks - 1) * (2.0 + 5.0) + 2 * (ranks - 1) / ranks * (1 << 22) * 1e-4)
    slow = Estimator(model({key(): WITHIN}), network=Link(5.0, 1e-2))
    slow_us = slow.estimate("all_reduce", 1 << 22, Shape(ranks, nodes)).time_us
    assert slow_us == pytest.approx(2 * (ranks - 1) * 7.0 + 2 * (ranks - 1) / ranks * (1 << 22) * 1e-2)
    assert "network" in found.marks


def test_ranks_of_a_host_share_its_link() -> None:
    some = {key("all_to_all_single"): points("all_to_all_single", "pairwise exchange", [Shape(2), Shape(4)], 2.0, 1e-6)}
    found = Estimator(model(some), network=Link(0.0, 1e-3)).estimate("all_to_all_single", 1 << 22, Shape(8, 2))
    # 4 ranks send 4 of 8 parts each to the other host.
    assert found.time_us == pytest.approx(7 * 2.0 + 4 * 4 / 8 * (1 << 22) * 1e-3)


def between(link: Link, alpha: float = 30.0, headers: float = 1.05) -> Model:
    shapes = [Shape(2, 2), Shape(4, 4)]
    some = points("all_reduce", "ring", shapes, alpha + link.latency_us, headers * link.beta_us_per_byte)
    return model({key(level="inter"): some, key(): points("all_reduce", "ring", [Shape(2)], 25.0, 2e-4)}, link)


@given(
    old=st.tuples(st.floats(0, 50), st.floats(1e-3, 1)),
    new=st.tuples(st.floats(0, 50), st.floats(1e-3, 1)),
)
def test_from_one_link_to_another(old: tuple[float, float], new: tuple[float, float]) -> None:
    """Fitted over one link, predicted over another: as if it had been fitted there."""
    shape, size = Shape(4, 4), 1 << 18
    expected = Estimator(between(Link(*new))).estimate("all_reduce", size, shape).time_us
    found = Estimator(between(Link(*old)), network=Link(*new)).estimate("all_reduce", size, shape)
    assert found.time_us == pytest.approx(expected, rel=1e-2)
    assert "network" in found.marks


def test_where_software_was_the_limit_a_faster_link_is_no_faster() -> None:
    slow_software = between(Link(0.0, 1e-3), headers=3.0)
    old_us = Estimator(slow_software).estimate("all_reduce", 1 << 20, Shape(2, 2)).time_us
    faster = Estimator(slow_software, network=Link(0.0, 1e-5)).estimate("all_reduce", 1 << 20, Shape(2, 2))
    slower = Estimator(slow_software, network=Link(0.0, 3e-2)).estimate("all_reduce", 1 << 20, Shape(2, 2))
    assert faster.time_us == pytest.approx(old_us)
    assert slower.time_us == pytest.approx(60 + (1 << 20) * 3e-2, rel=1e-2)


def test_without_the_old_link_a_new_one_builds_on_the_fit_within() -> None:
    whole = between(LINK)
    unnamed = Model("", "", "median", whole.fits)
    found = Estimator(unnamed, network=Link(1.0, 1e-3)).estimate("all_reduce", 1 << 20, Shape(2, 2))
    assert found.time_us == pytest.approx(2 * 26.0 + (1 << 20) * 1e-3, rel=1e-2)
    only_between = Model("", "", "median", tuple(fit for fit in whole.fits if fit.key.level == "inter"))
    with pytest.raises(NoFitError, match="--link"):
        Estimator(only_between, network=LINK).estimate("all_reduce", 1 << 20, Shape(2, 2))


@settings(deadline=None)
@given(
    operation=st.sampled_from(sorted(operations.recorded() - {"barrier"})),
    nodes=st.integers(1, 9),
    per_node=st.integers(1, 9),
    sizes=st.lists(st.integers(0, 1 << 34), min_size=2, max_size=12),
    network=st.one_of(st.none(), st.builds(Link, st.floats(0, 1e3), st.floats(1e-6, 1))),
    linked=st.booleans(),
)
def test_predictions_never_fall_with_the_size_and_lie_in_their_interval(
    operation: str, nodes: int, per_node: int, sizes: list[int], network: Link | None, linked: bool
) -> None:
    name = operations.get(operation).measured_as
    algorithm = candidates(name, "intra")[0]
    inside = points(name, algorithm, [Shape(2)], 2.0, 1e-4, SIZES[:6])
    inside += points(name, algorithm, [Shape(2)], 9.0, 5e-5, SIZES[6:])
    outside = points(name, algorithm, [Shape(2, 2)], 30.0, 1e-3, SIZES[:4])
    outside += points(name, algorithm, [Shape(2, 2)], 3.0, 3e-4, SIZES[4:])
    known = model({key(name): inside, key(name, "inter"): outside}, LINK if linked else None)
    estimator = Estimator(known, network=network)
    found = [estimator.estimate(operation, size, Shape(nodes * per_node, nodes)) for size in sorted(sizes)]
    for one in found:
        assert 0 <= one.low_us <= one.time_us <= one.high_us < math.inf
    for one, later in pairwise(found):
        assert later.time_us >= one.time_us * (1 - 1e-9)


@pytest.mark.parametrize(
    ("text", "latency_us", "gb_per_s"),
    [
        ("5us,100Gbit", 5, 12.5),
        ("5us,100Gbit/s", 5, 12.5),
        ("1.5 µs, 12.5GB/s", 1.5, 12.5),
        ("1ms,1gbit", 1000, 0.125),
        ("0us,400Mbit", 0, 0.05),
        ("500ns,200Gb/s", 0.5, 25),
        ("2us,25GBps", 2, 25),
    ],
)
def test_links_as_people_write_them(text: str, latency_us: float, gb_per_s: float) -> None:
    link = parse_link(text)
    assert link.latency_us == pytest.approx(latency_us)
    assert link.bandwidth_gb_per_s == pytest.approx(gb_per_s)


@pytest.mark.parametrize(
    "text", ["", "5us", "100Gbit", "5,100", "5us,100", "-5us,1Gbit", "5us,0Gbit", "5us,1Gbit,2", "x,y"]
)
def test_other_links_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"--network: got .*; expected a latency and a bandwidth"):
        parse_link(text)


def test_a_model_comes_back_from_its_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    whole = between(LINK)
    save(whole, tmp_path / "model.json")
    assert load(tmp_path / "model.json") == whole
    assert [file.name for file in tmp_path.iterdir()] == ["model.json"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data.update(format="comm-bench"), "format 'comm-bench'"),
        (lambda data: data.update(version=2), "version 2"),
        (lambda data: data.pop("fits"), "'fits'"),
        (lambda data: data["fits"][0].update(operation="telepathy"), "telepathy"),
        (lambda data: data["fits"][0]["pieces"][0].update(alpha_us=-1), "-1"),
        (lambda data: data["fits"][0]["pieces"][0].update(algorithm="magic"), "magic"),
        (lambda data: data["fits"][0].update(pieces=[]), "without pieces"),
        (lambda data: data["fits"][0].update(points=7), "int"),
        (lambda data: data["fits"][0]["residuals"].update(low="a lot"), "a lot"),
        (lambda data: data["fits"][0]["between_sizes"].update(high=0), "0"),
    ],
)
def test_a_file_that_is_no_model_is_refused_in_a_sentence(tmp_path, change, expected: str) -> None:  # type: ignore[no-untyped-def]
    import json

    file = tmp_path / "model.json"
    data = between(LINK).to_json()
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(ArgumentError, match="commctl fit") as caught:
        load(file)
    assert expected in str(caught.value)
    assert str(file) in str(caught.value)


INT8 = "int8(block_size=256)"


def compressed(of: Key) -> Key:
    return dataclasses.replace(of, codec=INT8)


def test_compressed_calls_take_what_was_measured_with_their_codec(tmp_path: Path) -> None:
    slow = points("all_reduce", "ring", [Shape(2), Shape(4)], 20.0, 1e-3)
    save(model({key(): WITHIN, compressed(key()): slow}), path := tmp_path / "model.json")
    estimator = Estimator(load(path))
    found = estimator.estimate("all_reduce", 8192, Shape(4), "float32", "sum", INT8, 2080)
    assert found.time_us == pytest.approx(6 * 20 + 1.5 * 8192 * 1e-3)
    assert found.marks == frozenset()
    # Of which calls without compression know nothing.
    assert estimator.estimate("all_reduce", 8192, Shape(4), "float32", "sum").time_us == pytest.approx(
        6 * 2 + 1.5 * 8192 * 1e-4
    )


def test_a_codec_that_was_not_measured_is_priced_by_its_bytes() -> None:
    estimator = Estimator(model({key(): WITHIN}))
    found = estimator.estimate("all_reduce", 1 << 20, Shape(4), "float32", "sum", INT8, 266_240.4)
    plain = estimator.estimate("all_reduce", 266_240, Shape(4), "float32", "sum")
    assert (found.time_us, found.low_us, found.high_us) == (plain.time_us, plain.low_us, plain.high_us)
    assert found.marks == plain.marks | {"codec"}
    alone = estimator.estimate("all_reduce", 1 << 20, Shape(1), "float32", "sum", INT8, 0.0)
    assert (alone.time_us, alone.marks) == (0, {"free"})


def test_over_another_network_only_the_bytes_count() -> None:
    between = points("all_reduce", "ring", [Shape(4, 2)], 50.0, 1e-3)
    some = {key(level="inter"): between, compressed(key(level="inter")): between, key(): WITHIN}
    network = Link(5.0, 1e-4)
    estimator = Estimator(model(some, Link(10.0, 1e-3)), network=network)
    found = estimator.estimate("all_reduce", 1 << 20, Shape(4, 2), "float32", "sum", INT8, 1 << 18)
    plain = estimator.estimate("all_reduce", 1 << 18, Shape(4, 2), "float32", "sum")
    assert found.time_us == plain.time_us
    assert "codec" in found.marks
