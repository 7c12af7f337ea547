"""Slurm's compressed lists."""

from __future__ import annotations

import contextlib
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_utils import LaunchError
from comm_utils.launch.hostlist import MAX_HOSTS, expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", "node1"),
        ("node[01-04,7],login1", "node01 node02 node03 node04 node7 login1"),
        ("gpu[1-2]x[3-4]", "gpu1x3 gpu1x4 gpu2x3 gpu2x4"),
        ("node[8-11]", "node8 node9 node10 node11"),
        ("node[008-010]", "node008 node009 node010"),
        ("node[98-101]-ib", "node98-ib node99-ib node100-ib node101-ib"),
        ("[1-2].example.org,a-b[3]", "1.example.org 2.example.org a-b3"),
        ("a[1,3-4,09]", "a1 a3 a4 a09"),
        ("b,a,b", "b a b"),
    ],
)
def test_hosts(text: str, hosts: str) -> None:
    assert expand_hosts(text) == hosts.split()


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,", ",a", "a,,b", "a b", "a[", "a]", "a[]", "a[1-]", "a[-1]", "a[2-1]", "a[x]", "a[1-2", "a[[1]]"],
)
def test_no_host_list(text: str) -> None:
    with pytest.raises(LaunchError, match=r"variable X: got .*; expected a list of hosts such as") as caught:
        expand_hosts(text, "variable X")
    assert repr(text) in str(caught.value)


_PREFIXES = st.from_regex(r"[a-z]([a-z.-]{0,5}[a-z.-])?", fullmatch=True)
_RANGES = st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 4))
_GROUPS = st.tuples(_PREFIXES, st.lists(_RANGES, min_size=1, max_size=3))


@given(st.lists(_GROUPS, min_size=1, max_size=4))
def test_what_is_compressed_comes_back(groups: list[tuple[str, list[tuple[int, int, int]]]]) -> None:
    compressed, hosts = [], []
    for prefix, ranges in groups:
        texts = []
        for first, length, width in ranges:
            numbers = [str(number).zfill(width) for number in range(first, first + length + 1)]
            texts.append(numbers[0] if length == 0 else f"{numbers[0]}-{numbers[-1]}")
            hosts += [prefix + number for number in numbers]
        compressed.append(f"{prefix}[{','.join(texts)}]")
    assert expand_hosts(",".join(compressed)) == hosts


@given(st.text(alphabet="ab01[],-", max_size=12))
def test_any_text_is_a_list_or_an_error(text: str) -> None:
    with contextlib.suppress(LaunchError):
        assert expand_hosts(text)


@pytest.mark.parametrize(
    "text",
    [
        *("node[1-999999999]", "node[0-65536]", "n[1-1000][1-1000][1-1000]", ",".join(["n[1-40000]"] * 2)),
        *("n[" + "9" * 5000 + "]", "n[1-" + "9" * 5000 + "]", "x" * 100_000 + "[1-60000]"),
    ],
    ids=lambda text: text[:30],
)
def test_lists_of_more_hosts_than_there_are_cost_nothing(text: str) -> None:
    start = time.thread_time()
    with pytest.raises(LaunchError, match=r"host list: got '.*expected") as caught:
        expand_hosts(text)
    assert time.thread_time() - start < 2.0
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["2(x9999999999)", "1(x40000),1(x40000)", "1(x" + "9" * 5000 + ")", "9" * 5000])
def test_counts_of_more_hosts_than_there_are_cost_nothing(text: str) -> None:
    start = time.thread_time()
    with pytest.raises(LaunchError, match=r"task counts: got '.*expected") as caught:
        expand_counts(text)
    assert time.thread_time() - start < 2.0
    assert len(str(caught.value)) < 500


def test_the_largest_cluster_is_expanded() -> None:
    assert len(expand_hosts(f"node[1-{MAX_HOSTS}]")) == len(expand_counts(f"1(x{MAX_HOSTS})")) == MAX_HOSTS


@pytest.mark.parametrize(
    ("text", "counts"), [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("4,4(x1),3(x2)", [4, 4, 3, 3]), ("10(x2)", [10, 10])]
)
def test_counts(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 50)), min_size=1, max_size=6))
def test_counts_come_back(runs: list[tuple[int, int]]) -> None:
    text = ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in runs)
    assert expand_counts(text) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize("text", ["", ",", "2,", "x", "2(3)", "2(x)", "2x3", "-1", "2 (x3)", "1.5"])
def test_no_counts(text: str) -> None:
    with pytest.raises(LaunchError, match=r"variable X: got .*; expected task counts such as"):
        expand_counts(text, "variable X")


def test_many_brackets_are_not_expanded_before_they_are_too_many() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(LaunchError, match=f"of more than {MAX_HOSTS} hosts"):
            expand_hosts("a[1-30000]" * 50)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
