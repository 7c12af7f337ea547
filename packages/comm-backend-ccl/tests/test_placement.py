"""Who shares hardware threads, and who reads from whom first."""

from __future__ import annotations

import math
import os

import pytest

from comm_backend_ccl.placement import Place, are_oversubscribed, cache_share, decoded, mine, reading_order
from comm_utils.topology import Placement, allowed_cpus, parse_cpu_list


def places(*lists: str) -> list[Place]:
    return [Place(parse_cpu_list(one)) for one in lists]


@pytest.fixture(autouse=True)
def _without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("lists", "oversubscribed"),
    [
        (("0-1", "0-1"), False),
        (("0", "1"), False),
        (("0", "0"), True),
        (("0", "0", "1-7"), True),
        (("0-1", "0-1", "0-1"), True),
        (("0", "0-1", "0-2"), False),
        (("", ""), False),
        (("0",), False),
    ],
)
def test_ranks_that_share_hardware_threads_are_oversubscribed(lists: tuple[str, ...], oversubscribed: bool) -> None:
    assert are_oversubscribed(places(*lists), frozenset(range(8))) == oversubscribed


def test_so_are_those_of_a_host_with_more_ranks_than_the_group_has(monkeypatch: pytest.MonkeyPatch) -> None:
    together, apart = places("0-3", "0-3"), places("0", "1")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for ranks, oversubscribed in {"4": False, "5": True, "": False, "many": False, "²": False}.items():
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert are_oversubscribed(together, frozenset(range(4))) == oversubscribed, ranks
        assert not are_oversubscribed(together, frozenset(range(8))), "the launcher has more than its ranks"
        assert not are_oversubscribed(apart, frozenset({0})), "under a wrapper that is bound with its rank"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "9")
    assert are_oversubscribed(apart, frozenset({0}))


def test_a_place_survives_the_store() -> None:
    several = (frozenset({0, 1}), frozenset({2, 3}))
    one = Place.of(Placement(frozenset({0, 1, 2}), caches=several, nodes=(3,), packages=(0,)))
    assert one == Place(frozenset({0, 1, 2}), None, 3, 0)
    assert decoded(one.encoded()) == one
    assert mine().cpus == allowed_cpus()


@pytest.mark.parametrize("found", [None, 3, [], ["0"], [0, 0, 0, 0], ["0-99999999999", 0, 0, 0], {"cpus": "0"}])
def test_what_is_no_place_is_unknown(found: object) -> None:
    assert decoded(found) == Place(frozenset())


def test_units_that_are_no_numbers_are_unknown() -> None:
    assert decoded(["1", "a", None, True]) == Place(frozenset({1}))


def test_without_a_topology_ranks_follow_each_other() -> None:
    unknown = [Place(frozenset({0, 1, 2, 3}))] * 4
    assert [reading_order(unknown, rank) for rank in range(4)] == [[1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2]]
    assert reading_order(unknown[:1], 0) == []


@pytest.mark.parametrize(
    ("caches", "expected"),
    [((0, 0), 16), ((0, 4), 32), ((0, 0, 4, None), 10), ((None, 0), 16), ((4, 0, 0, 0), 32)],
)
def test_ranks_share_a_cache_with_those_that_have_it_and_those_of_which_nothing_is_known(
    caches: tuple[int | None, ...], expected: int
) -> None:
    places = [Place(frozenset({one}), cache) for one, cache in enumerate(caches)]
    assert cache_share(places, 0, 32) == expected
    assert cache_share(places, 0, 0) == 0


def on_sockets(shape: tuple[int, int, int, int], interleaved: bool) -> list[Place]:
    """Return ranks on sockets; ``shape`` is how many there are, the nodes of each, their caches, and their ranks."""
    _, nodes, caches, ranks = shape
    found = []
    for core in range(math.prod(shape)):
        cache = core // ranks
        node = cache // caches
        found.append(Place(frozenset({core}), cache * ranks, node, node // nodes))
    # As of a launcher that gives the sockets ranks by turns.
    return [found[turn] for first in range(7) for turn in range(first, len(found), 7)] if interleaved else found


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(2, 1, 2, 2), (1, 4, 1, 3), (2, 2, 2, 2), (3, 1, 2, 4), (1, 1, 4, 4), (4, 2, 2, 1)])
def test_near_peers_come_first_and_no_two_ranks_read_the_same_at_once(
    shape: tuple[int, int, int, int], interleaved: bool
) -> None:
    ranks = on_sockets(shape, interleaved)
    orders = [reading_order(ranks, rank) for rank in range(len(ranks))]
    for rank, order in enumerate(orders):
        assert sorted([*order, rank]) == list(range(len(ranks)))
        far = [[mine != theirs for mine, theirs in zip(ranks[one][1:], ranks[rank][1:], strict=True)] for one in order]
        assert far == sorted(far, key=lambda one: one[::-1])
    for step in range(len(ranks) - 1):
        assert len({order[step] for order in orders}) == len(ranks), step


def test_groups_of_different_sizes_leave_nobody_out() -> None:
    ranks = [Place(frozenset({0}), 0, 0, 0)] * 3 + [Place(frozenset({4}), 4, 0, 0), Place(frozenset({8}), 8, 1, None)]
    assert [reading_order(ranks, rank) for rank in range(5)] == [
        [1, 2, 3, 4],
        [2, 0, 3, 4],
        [0, 1, 3, 4],
        [0, 1, 2, 4],
        [0, 1, 2, 3],
    ]


def test_a_rank_with_several_nodes_is_near_to_nobody() -> None:
    ranks = [Place(frozenset({0, 4})), Place(frozenset({0}), 0, 0, 0), Place(frozenset({1}), 0, 0, 0)]
    assert [reading_order(ranks, rank) for rank in range(3)] == [[1, 2], [2, 0], [1, 0]]
