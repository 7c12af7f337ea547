"""Several groups at once, and the names of ``torch.distributed`` for what else we have; compared with torch's own."""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as c10d

import comm_orchestrator as dist
from comm_utils.errors import ArgumentTypeError
from comm_utils.testing import RankPool, per_rank

Pools: TypeAlias = Callable[[int], RankPool]
OUTSIDE = "outside"
RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def told(group: Any) -> Any:
    """The global ranks of a group in its order, after an all_reduce over it that shows that it works."""
    if group is None:
        return None
    if group == dist.NON_GROUP_MEMBER:
        return OUTSIDE
    ranks = dist.get_process_group_ranks(group)
    tensor = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == sum(2.0**rank for rank in ranks)
    assert ranks[dist.get_rank(group)] == dist.get_rank()
    return ranks


def destroy(*groups: Any) -> None:
    for group in groups:
        if group is not None and group != dist.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def check_world() -> None:
    assert told(dist.get_world_group()) == list(range(dist.get_world_size()))


def expected(parts: Sequence[list[int]], rank: int) -> tuple[Any, list[Any]]:
    """What rank ``rank`` is told of groups of ``parts``."""
    entries = [part if rank in part else OUTSIDE for part in parts]
    return next((part for part in parts if rank in part), OUTSIDE), entries


# --- new_subgroups


def run_new_subgroups(size: int) -> tuple[Any, Any]:
    found = []
    for module in (dist, c10d):
        own, groups = module.new_subgroups(size)
        assert own in groups
        found.append((told(own), [told(group) for group in groups]))
        destroy(*groups)
    check_world()
    return found[0], found[1]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_new_subgroups(pools: Pools, size: int) -> None:
    parts = [list(range(start, start + size)) for start in range(0, 4, size)]
    for rank, (ours, theirs) in enumerate(pools(4).run(run_new_subgroups, size)):
        assert ours == theirs == expected(parts, rank)


def run_subgroups_of_a_group(ranks: list[int], sort: bool) -> Any:
    parent = dist.new_group(ranks, sort_ranks=sort)
    found = None
    if dist.get_rank() in ranks:
        own, groups = dist.new_subgroups(1 if len(ranks) == 3 else 2, group=parent)
        found = told(own), [told(group) for group in groups]
        destroy(*groups, parent)
    check_world()
    return found


@pytest.mark.parametrize(
    ("ranks", "sort", "parts"),
    [
        ([0, 1, 3], True, [[0], [1], [3]]),
        ([3, 0, 1], False, [[3], [0], [1]]),
        ([0, 1, 2, 3], True, [[0, 1], [2, 3]]),
        ([3, 0, 2, 1], False, [[0, 3], [1, 2]]),  # neighbours in the parent; sorted within each, as torch's are
    ],
)
def test_new_subgroups_of_a_group(pools: Pools, ranks: list[int], sort: bool, parts: list[list[int]]) -> None:
    for rank, found in enumerate(pools(4).run(run_subgroups_of_a_group, ranks, sort)):
        assert found == (expected(parts, rank) if rank in ranks else None)


def run_default_size() -> str:
    with pytest.raises(dist.ArgumentError) as raised:
        dist.new_subgroups()
    return str(raised.value)


@pytest.mark.skipif(
    hasattr(torch, "accelerator") and torch.accelerator.device_count() > 0, reason="has accelerators to count"
)
def test_default_size_needs_accelerators(pools: Pools) -> None:
    for text in pools(2).run(run_default_size):
        assert text.startswith("new_subgroups: group_size: missing; this host has no accelerators")


# --- new_subgroups_by_enumeration


def run_enumeration(lists: list[list[int]]) -> tuple[Any, Any]:
    found = []
    for module in (dist, c10d):
        own, groups = module.new_subgroups_by_enumeration(lists)
        assert own is None or own in groups or own == dist.NON_GROUP_MEMBER
        found.append((told(own), [told(group) for group in groups]))
        destroy(*groups)
    check_world()
    return found[0], found[1]


@pytest.mark.parametrize(
    "lists",
    [[[0, 2], [1, 3]], [[3], [0, 1, 2]], [[2, 0], [3]], [[1, 3]], [[3, 2, 1, 0]]],
    ids=str,
)
def test_new_subgroups_by_enumeration(pools: Pools, lists: list[list[int]]) -> None:
    parts = [sorted(part) for part in lists]
    for rank, (ours, theirs) in enumerate(pools(4).run(run_enumeration, lists)):
        own, entries = expected(parts, rank)
        assert ours == (own, entries)
        # torch gives None to who is in none, which its collectives take for the world.
        assert theirs == (None if own == OUTSIDE else own, entries)


# --- split_group


def run_split(lists: list[list[int]], parent_ranks: list[int] | None) -> Any:
    parent = None if parent_ranks is None else dist.new_group(parent_ranks, sort_ranks=False)
    if parent == dist.NON_GROUP_MEMBER:
        check_world()
        return OUTSIDE
    group = dist.split_group(parent, lists, group_desc="a part")
    found = told(group)
    if group is not None:
        assert group.group_desc == "a part"
    destroy(group, parent)
    check_world()
    return found


@pytest.mark.parametrize(
    ("lists", "parent", "found"),
    [
        ([[0, 1], [2, 3]], None, [[0, 1], [0, 1], [2, 3], [2, 3]]),
        ([[3, 1]], None, [None, [1, 3], None, [1, 3]]),
        ([[0, 1, 2, 3]], None, [[0, 1, 2, 3]] * 4),
        ([[0], [1, 2]], [1, 2, 3], [OUTSIDE, [1], [2, 3], [2, 3]]),
        ([[0, 2]], [1, 2, 3], [OUTSIDE, [1, 3], None, [1, 3]]),
        ([[0, 1], [2]], [3, 0, 2], [[3, 0], OUTSIDE, [2], [3, 0]]),
        ([[2, 1]], [3, 2, 0], [[2, 0], OUTSIDE, [2, 0], None]),  # in the order of the parent, whatever that of the list
    ],
    ids=str,
)
def test_split_group(
    pools: Pools, lists: list[list[int]], parent: list[int] | None, found: list[list[int] | None]
) -> None:
    assert pools(4).run(run_split, lists, parent) == found


def run_split_of_a_split() -> Any:
    first = dist.split_group(None, [[0, 2, 3]])
    found = None
    if first is not None:
        second = dist.split_group(first, [[1, 2]])
        found = told(second)
        destroy(second, first)
    check_world()
    return found


def test_split_of_a_split(pools: Pools) -> None:
    assert pools(4).run(run_split_of_a_split) == [None, None, [2, 3], [2, 3]]


# --- all_gather_single and reduce_scatter_single


def run_single() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(3.0) + 10 * rank
    ours, theirs = torch.zeros(3 * W), torch.zeros(3 * W)
    assert dist.all_gather_single(ours, mine) is None
    c10d.all_gather_into_tensor(theirs, mine)
    assert torch.equal(ours, theirs)
    assert ours.tolist() == [10.0 * r + i for r in range(W) for i in range(3)]
    everything = torch.arange(3.0 * W) * (rank + 1)
    part = torch.zeros(3)
    for op, factor in (("sum", W * (W + 1) / 2), ("max", W), ("avg", (W + 1) / 2)):
        assert dist.reduce_scatter_single(part, everything, op=op) is None
        assert part.tolist() == [(3 * rank + i) * factor for i in range(3)]
    work = dist.reduce_scatter_single(part.zero_(), everything, async_op=True)
    assert work is not None
    assert work.wait()
    assert part.tolist() == [(3 * rank + i) * W * (W + 1) / 2 for i in range(3)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_single(pools: Pools, world_size: int) -> None:
    pools(world_size).run(run_single)


@pytest.mark.parametrize(
    ("name", "old"),
    [("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor")],
)
def test_single_is_another_name(name: str, old: str) -> None:
    assert getattr(dist, name) is getattr(dist, old)


# --- init_process_group


def run_start(kind: str, place: str, device_id: Any = None) -> tuple[str, int, int]:
    rank, W = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    given: dict[str, Any] = {"world_size": W, "rank": rank, "device_id": device_id}
    if kind == "env":
        given = {"init_method": "env://"}
    elif kind == "nothing":
        given = {}
    elif kind == "tcp":
        given["init_method"] = f"tcp://127.0.0.1:{place}"
    elif kind == "file":
        given["init_method"] = f"file://{place}"
    else:
        given["store"] = dist.FileStore(place, W)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30), **given)
    try:
        assert c10d.is_initialized()
        assert dist.is_initialized()
        check_world()
        with pytest.raises(dist.ArgumentError, match=r"^init_process_group: there is a world already; call destroy_"):
            dist.init_process_group("gloo")
        dist.init_distributed(verbose=False)  # which keeps it
        check_world()
        found = dist.get_backend(), dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()
    assert not dist.is_initialized()
    return found


@pytest.mark.parametrize("kind", ["nothing", "env", "tcp", "file", "store"])
def test_init_process_group(bare_pools: Pools, tmp_path: Path, free_port: int, kind: str) -> None:
    place = str(free_port) if kind == "tcp" else str(tmp_path / "meet")
    assert bare_pools(2).run(run_start, kind, place, timeout_s=40) == [("gloo", 0, 2), ("gloo", 1, 2)]


@pytest.mark.parametrize("devices", [[torch.device("cpu")] * 2, [0, 1]], ids=["device", "index"])
def test_device_id(bare_pools: Pools, tmp_path: Path, devices: list[Any]) -> None:
    found = bare_pools(2).run(run_start, "file", str(tmp_path / "meet"), per_rank(devices), timeout_s=40)
    assert found == [("gloo", 0, 2), ("gloo", 1, 2)]


def run_in_torchs_order(place: str) -> list[int]:
    """Backend, init_method, timeout, world_size, rank: by position, as programs of torch pass them."""
    dist.init_process_group("gloo", f"file://{place}", timedelta(seconds=30), 1, 0, None, "name", None, None)
    try:
        return list(told(dist.get_world_group()))
    finally:
        dist.destroy_process_group()


def test_parameters_are_torchs(bare_pools: Pools, tmp_path: Path) -> None:
    assert bare_pools(1).run(run_in_torchs_order, str(tmp_path / "meet")) == [[0]]
    if RELEASE == (2, 13):  # whose signatures ours are
        for name in ("init_process_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group"):
            theirs = [one for one in inspect.signature(getattr(c10d, name)).parameters if one[0] != "_"]
            assert list(inspect.signature(getattr(dist, name)).parameters) == theirs


def run_wrong_start() -> None:
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"pg_options": object()}, dist.ArgumentError, "init_process_group: pg_options: got <object"),
        ({"device_id": "cpu"}, ArgumentTypeError, "init_process_group: device_id: got 'cpu'; expected a torch.device"),
        ({"device_id": True}, ArgumentTypeError, "init_process_group: device_id: got True; expected a torch.device"),
    ]
    wrong.append(
        (
            {"init_method": "tcp://127.0.0.1:1", "store": c10d.HashStore(), "rank": 0, "world_size": 1},
            dist.ArgumentError,
            "init_distributed: got both init_method='tcp://127.0.0.1:1' and store; expected one of them",
        )
    )
    for given, error, text in wrong:
        with pytest.raises(error) as raised:
            dist.init_process_group("gloo", **given)
        assert str(raised.value).startswith(text)
        assert not dist.is_initialized()
    c10d.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    with pytest.raises(dist.ArgumentError, match=r"^init_process_group: there is a world already"):
        dist.init_process_group("gloo")
    c10d.destroy_process_group()


def test_wrong_init_process_group(bare_pools: Pools) -> None:
    bare_pools(1).run(run_wrong_start)


# --- wrong arguments


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "size-zero": (lambda: dist.new_subgroups(0), dist.ArgumentError, "new_subgroups: group_size: got 0; expected a"),
    "size-negative": (
        lambda: dist.new_subgroups(-2),
        dist.ArgumentError,
        "new_subgroups: group_size: got -2; expected",
    ),
    "size-odd": (
        lambda: dist.new_subgroups(3),
        dist.ArgumentError,
        "new_subgroups: group_size: got 3; expected a divisor of 4, the number of ranks in the group",
    ),
    "size-large": (lambda: dist.new_subgroups(8), dist.ArgumentError, "new_subgroups: group_size: got 8; expected a"),
    "size-string": (
        lambda: dist.new_subgroups("2"),
        ArgumentTypeError,
        "new_subgroups: group_size: got '2' of type str",
    ),
    "size-bool": (lambda: dist.new_subgroups(True), ArgumentTypeError, "new_subgroups: group_size: got True of type"),
    "group": (
        lambda: dist.new_subgroups(2, "world"),
        ArgumentTypeError,
        "new_subgroups: group: got 'world' of type str",
    ),
    "outside": (
        lambda: dist.new_subgroups(2, dist.NON_GROUP_MEMBER),
        dist.ArgumentError,
        "new_subgroups: group: got one that this rank is not a member of",
    ),
    "backend": (
        lambda: dist.new_subgroups(2, backend=5),
        ArgumentTypeError,
        "new_subgroups: backend: got 5; expected a",
    ),
    "enumeration-none": (
        lambda: dist.new_subgroups_by_enumeration(None),
        ArgumentTypeError,
        "new_subgroups_by_enumeration: ranks_per_subgroup_list: got None; expected a list of lists of ranks",
    ),
    "enumeration-flat": (
        lambda: dist.new_subgroups_by_enumeration([0, 1]),
        ArgumentTypeError,
        "new_subgroups_by_enumeration: ranks_per_subgroup_list: got a list of 2; expected a list of lists of ranks",
    ),
    "enumeration-empty": (
        lambda: dist.new_subgroups_by_enumeration([]),
        dist.ArgumentError,
        "new_subgroups_by_enumeration: ranks_per_subgroup_list: got an empty list; expected at least one list",
    ),
    "enumeration-empty-list": (
        lambda: dist.new_subgroups_by_enumeration([[0], []]),
        dist.ArgumentError,
        "new_subgroups_by_enumeration: ranks_per_subgroup_list: got [[0], []]; expected no empty list",
    ),
    "enumeration-twice": (
        lambda: dist.new_subgroups_by_enumeration([[0, 1], [1, 2]]),
        dist.ArgumentError,
        "new_subgroups_by_enumeration: ranks_per_subgroup_list: got [[0, 1], [1, 2]], which names a rank twice",
    ),
    "enumeration-outside": (
        lambda: dist.new_subgroups_by_enumeration([[0, 1], [2, 9]]),
        dist.ArgumentError,
        "new_subgroups_by_enumeration: ranks_per_subgroup_list: got [[0, 1], [2, 9]]; expected ranks from 0 to 3, not",
    ),
    "enumeration-string": (
        lambda: dist.new_subgroups_by_enumeration([["0"]]),
        ArgumentTypeError,
        "new_subgroups_by_enumeration: ranks_per_subgroup_list: got '0' of type str; expected an integer",
    ),
    "split-missing": (
        lambda: dist.split_group(),
        dist.ArgumentError,
        "split_group: split_ranks: missing; expected lists",
    ),
    "split-empty": (
        lambda: dist.split_group(None, []),
        dist.ArgumentError,
        "split_group: split_ranks: got an empty list",
    ),
    "split-flat": (
        lambda: dist.split_group(None, [0, 1]),
        ArgumentTypeError,
        "split_group: split_ranks: got a list of 2; expected a list of lists of ranks",
    ),
    "split-twice": (
        lambda: dist.split_group(None, [[0, 0]]),
        dist.ArgumentError,
        "split_group: split_ranks: got [[0, 0]], which names a rank twice",
    ),
    "split-outside": (
        lambda: dist.split_group(None, [[0, 4]]),
        dist.ArgumentError,
        "split_group: split_ranks: got [[0, 4]]; expected ranks from 0 to 3, not [4]",
    ),
    "split-negative": (
        lambda: dist.split_group(None, [[0, -1]]),
        dist.ArgumentError,
        "split_group: split_ranks: got [[0, -1]]; expected ranks from 0 to 3, not [-1]",
    ),
    "split-parent": (
        lambda: dist.split_group("world", [[0]]),
        ArgumentTypeError,
        "split_group: parent_pg: got 'world' of type str; expected a process group",
    ),
    "split-outside-parent": (
        lambda: dist.split_group(dist.NON_GROUP_MEMBER, [[0]]),
        dist.ArgumentError,
        "split_group: parent_pg: got one that this rank is not a member of",
    ),
}


def run_wrong(label: str) -> None:
    call, error, text = WRONG[label]
    before = set(c10d.distributed_c10d._world.pg_map)
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    assert str(raised.value).startswith(text), raised.value
    assert set(c10d.distributed_c10d._world.pg_map) == before  # nothing was made before the fault was seen
    own, groups = dist.new_subgroups(2)
    told(own)
    destroy(*groups)


@pytest.mark.parametrize("label", WRONG)
def test_wrong_arguments(pools: Pools, label: str) -> None:
    pools(4).run(run_wrong, label)


def run_threads(is_crossed: bool) -> list[str]:
    """Two threads of each of ranks 0 and 1 make a group each; crossed, in another order on rank 1."""
    rank, texts, done = dist.get_rank(), [], []
    first, second = ([0, 1], [0, 1, 2]) if not is_crossed or rank == 0 else ([0, 1, 2], [0, 1])

    def make(members: list[int], timeout: float = 30) -> None:
        try:
            group = dist.new_group(members, timeout=timeout)
        except dist.CommError as error:
            texts.append(f"{type(error).__name__}: {error}")
        else:
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            done.append(total.item() == len(members))

    if rank < 2:
        limits = (6, 2) if is_crossed else (30, 30)
        threads = [threading.Thread(target=make, args=given) for given in zip((first, second), limits, strict=True)]
        threads[0].start()
        time.sleep(0.2)
        threads[1].start()
        for thread in threads:
            thread.join()
    elif not is_crossed:
        time.sleep(0.5)
        make([0, 1, 2])
    dist.monitored_barrier(timeout=20)
    if not is_crossed:
        assert done == [True] * (2 if rank < 2 else 1), (texts, done)
    return texts


def test_threads_make_groups_one_after_the_other(pools: Pools) -> None:
    assert pools(3).run(run_threads, False) == [[], [], []]


def test_threads_that_make_groups_in_another_order_learn_it(bare_pools: Pools) -> None:
    """Each of the ranks waits in one thread for the group that the other makes later."""
    found = bare_pools(3).run(run_threads_in_a_world)
    assert all(found[:2]), found
    learned = ("use their groups in different orders", "another thread of this process makes the group of ranks")
    assert any(one in text for texts in found for text in texts for one in learned), found


def run_threads_in_a_world() -> list[str]:
    dist.init_distributed("gloo", timeout=30, verbose=False)
    try:
        return run_threads(True)
    finally:
        dist.destroy_process_group()
