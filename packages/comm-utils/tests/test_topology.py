"""Placements from recorded trees of sysfs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from comm_utils import topology
from comm_utils.errors import ArgumentError
from comm_utils.topology import Placement, format_cpu_list, overcommitted, parse_cpu_list, read_placement

Tree = dict[str, str]


def cpu(number: int, threads: str, package: int | str, caches: Mapping[int, str]) -> Tree:
    """Return the files of one hardware thread.

    Args:
        threads: of its core.
        caches: the threads that share the cache of each level.
    """
    here = f"devices/system/cpu/cpu{number}"
    tree = {
        f"{here}/topology/thread_siblings_list": threads,
        f"{here}/topology/physical_package_id": str(package),
        f"{here}/cache/index0/level": "1",
        f"{here}/cache/index0/type": "Data",
        f"{here}/cache/index0/shared_cpu_list": threads,
        f"{here}/cache/index1/level": "1",
        f"{here}/cache/index1/type": "Instruction",
        f"{here}/cache/index1/shared_cpu_list": threads,
    }
    for index, (level, shared) in enumerate(caches.items(), 2):
        folder = f"{here}/cache/index{index}"
        tree |= {f"{folder}/level": str(level), f"{folder}/type": "Unified", f"{folder}/shared_cpu_list": shared}
    return tree


def nodes(*lists: str) -> Tree:
    folder = "devices/system/node"
    online = {f"{folder}/online": f"0-{len(lists) - 1}"}
    return online | {f"{folder}/node{number}/cpulist": cpus for number, cpus in enumerate(lists)}


def written(root: Path, *trees: Tree) -> Path:
    for tree in trees:
        for name, text in tree.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
    return root


def sets(*lists: str) -> tuple[frozenset[int], ...]:
    return tuple(parse_cpu_list(one) for one in lists)


def one_socket(root: Path) -> Path:
    """Write a desktop of 4 cores with one thread each."""
    return written(root, *(cpu(one, str(one), 0, {2: str(one), 3: "0-3"}) for one in range(4)), nodes("0-3"))


def two_sockets(root: Path) -> Path:
    """Write two Xeons of 4 cores with two threads each; Linux numbers the second threads last."""
    cpus = []
    for one in range(16):
        core, package = one % 8, one % 8 // 4
        cores, threads = ("0-3", "8-11") if package == 0 else ("4-7", "12-15")
        cpus.append(cpu(one, f"{core},{core + 8}", package, {2: f"{core},{core + 8}", 3: f"{cores},{threads}"}))
    return written(root, *cpus, nodes("0-3,8-11", "4-7,12-15"))


def epyc(root: Path) -> Path:
    """Write an EPYC of one socket: two NUMA nodes, each with two caches of two cores."""
    cpus = [cpu(one, str(one), 0, {2: str(one), 3: f"{one // 2 * 2}-{one // 2 * 2 + 1}"}) for one in range(8)]
    return written(root, *cpus, nodes("0-3", "4-7"))


def test_one_socket(tmp_path: Path) -> None:
    found = read_placement({0, 1}, one_socket(tmp_path))
    assert found == Placement(frozenset({0, 1}), sets("0", "1"), sets("0-3"), (0,), (0,))


def test_two_sockets_with_two_threads_a_core(tmp_path: Path) -> None:
    root = two_sockets(tmp_path)
    assert read_placement({0, 8}, root) == Placement(frozenset({0, 8}), sets("0,8"), sets("0-3,8-11"), (0,), (0,))
    assert read_placement({3, 4}, root) == Placement(
        frozenset({3, 4}), sets("3,11", "4,12"), sets("0-3,8-11", "4-7,12-15"), (0, 1), (0, 1)
    )
    everything = read_placement(range(16), root)
    assert (len(everything.cores), len(everything.caches), everything.nodes) == (8, 2, (0, 1))


def test_several_caches_in_a_node(tmp_path: Path) -> None:
    root = epyc(tmp_path)
    assert read_placement({2, 3}, root).caches == sets("2-3")
    found = read_placement({1, 2}, root)
    assert (found.caches, found.nodes, found.packages) == (sets("0-1", "2-3"), (0,), (0,))
    assert read_placement(range(8), root).nodes == (0, 1)


def test_the_highest_level_counts_whatever_its_index(tmp_path: Path) -> None:
    root = written(tmp_path, cpu(0, "0", 0, {3: "0-7", 2: "0-1"}))
    assert read_placement({0}, root).caches == sets("0-7")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (("32768K", "16384K"), 16384 << 10),
        (("32768K", "32M"), 0),
        (("", "-1K"), 0),
        (("9" * 99 + "K", "٣K"), 0),
    ],
)
def test_the_smallest_of_the_last_caches_has_its_size(tmp_path: Path, sizes: tuple[str, str], expected: int) -> None:
    root = epyc(tmp_path)
    for first, size in zip((0, 2), sizes, strict=True):
        (root / f"devices/system/cpu/cpu{first}/cache/index3/size").write_text(size + "\n")
    assert read_placement({0, 1, 2, 3}, root).cache_bytes == expected
    assert read_placement({4}, root).cache_bytes == 0


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        ("cache", Placement(frozenset({0, 1}), sets("0", "1"), (), (0,), (0,))),
        ("topology", Placement(frozenset({0, 1}), sets("0", "1"), sets("0-3"), (0,), ())),
        ("devices/system/node", Placement(frozenset({0, 1}), sets("0", "1"), sets("0-3"), (), (0,))),
        ("online", Placement(frozenset({0, 1}), sets("0", "1"), sets("0-3"), (0,), (0,))),
        ("level", Placement(frozenset({0, 1}), sets("0", "1"), sets("0-3"), (0,), (0,))),
        ("devices", Placement(frozenset({0, 1}), sets("0", "1"))),
    ],
)
def test_containers_that_hide_files(tmp_path: Path, left_out: str, expected: Placement) -> None:
    for file in sorted(one_socket(tmp_path).rglob("*")):
        if file.is_file() and left_out in f"{file.relative_to(tmp_path)}":
            file.unlink()
    assert read_placement({0, 1}, tmp_path) == expected


@pytest.mark.parametrize(
    "text", ["0-99999999999", "0-", "-1", "5-2", "a", "0,,1", "\u0663", "0-3/2", "9" * 70000, "\0"]
)
def test_hostile_files_are_as_good_as_missing(tmp_path: Path, text: str) -> None:
    root = one_socket(tmp_path)
    for file in root.rglob("*"):
        if file.is_file():
            file.write_text(text)
    begun_s = time.perf_counter()
    found = read_placement({0, 1}, root)
    assert time.perf_counter() - begun_s < 1
    assert found == Placement(frozenset({0, 1}), sets("0", "1"))


def test_files_that_are_no_text_or_no_files(tmp_path: Path) -> None:
    here = tmp_path / "devices/system/cpu/cpu0"
    (here / "topology/thread_siblings_list").mkdir(parents=True)
    (here / "cache/index0").mkdir(parents=True)
    (here / "cache/index0/shared_cpu_list").write_bytes(b"\xff\xfe0")
    (tmp_path / "devices/system/node/nodeX").mkdir(parents=True)
    assert read_placement({0}, tmp_path) == Placement(frozenset({0}), sets("0"))


def test_lists_of_cpus_are_read_and_written() -> None:
    for text, cpus in {"": set(), "0": {0}, "0-2,5": {0, 1, 2, 5}, "7,9-10": {7, 9, 10}}.items():
        assert parse_cpu_list(text + "\n") == cpus
        assert format_cpu_list(cpus) == text
    assert parse_cpu_list("1,0-2") == {0, 1, 2}


@pytest.mark.parametrize("text", ["0-99999999999", "99999999999999999999", ",".join(["0-16382"] * 8000), "0," * 40000])
def test_lists_of_cpus_are_bounded(text: str) -> None:
    begun_s = time.perf_counter()
    with pytest.raises(ArgumentError, match="a list of cpus: got "):
        parse_cpu_list(text)
    assert time.perf_counter() - begun_s < 1


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        (("0", "1"), []),
        (("0-1", "0-1"), []),
        (("0", "0-1"), []),
        (("0-1", "0"), []),
        (("0", "0"), [((0, 1), "0")]),
        (("0", "0", "1-3"), [((0, 1), "0")]),
        (("0", "0", "0", "0"), [((0, 1, 2, 3), "0")]),
        (("0-1", "0-1", "0-1", "0-1"), [((0, 1, 2, 3), "0-1")]),
        (("0", "0", "2", "2", "4-7"), [((0, 1), "0"), ((2, 3), "2")]),
        (("0-1", "1-2", "0,2", "0-2"), [((0, 1, 2, 3), "0-2")]),
        (("", "0", "0"), [((1, 2), "0")]),
        (("", ""), []),
    ],
)
def test_ranks_without_a_unit_of_their_own(lists: tuple[str, ...], expected: list[tuple[tuple[int, ...], str]]) -> None:
    found = overcommitted({rank: parse_cpu_list(one) for rank, one in enumerate(lists)})
    assert [(ranks, format_cpu_list(cpus)) for ranks, cpus in found] == expected


def test_many_ranks_on_many_cpus_take_no_time() -> None:
    begun_s = time.perf_counter()
    assert overcommitted({rank: frozenset(range(256)) for rank in range(256)}) == []
    (found,) = overcommitted({rank: frozenset(range(200)) for rank in range(256)})
    assert (len(found[0]), len(found[1])) == (256, 200)
    assert time.perf_counter() - begun_s < 5


def test_this_process_is_somewhere() -> None:
    found = topology.this_placement()
    assert found.cpus == topology.allowed_cpus() <= topology.cpus_of_launcher()
    assert frozenset().union(*found.cores) >= found.cpus
    assert topology.allowed_cpus(2**22 + 1) == frozenset()
