"""Ranges: torch's profiler and tools that read NVTX see them, names are bounded, and nothing is made for nobody."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from comm_collectives.recorded import profiler_ranges
from comm_collectives.recorded.profiler_ranges import KINDS, Ranges, available, open_range
from comm_utils import operations
from comm_utils.errors import ArgumentError, BackendUnavailableError

LISTENER = Path(__file__).parent / "nvtx_listener.c"
NO_NVTX = not hasattr(torch._C, "_nvtx") and importlib.util.find_spec("nvtx") is None


def profiled() -> Any:
    return profile(activities=[ProfilerActivity.CPU])


def names(prof: Any) -> list[str]:
    return [event.name for event in prof.events() if event.name.startswith("comm.")]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("all_reduce", 4096, (0, 1)), "comm.all_reduce 4 KiB [0 1]"),
        (("broadcast", 5, (3, 1), True), "comm.broadcast 5 B [3 1] async"),
        (("all_reduce", 0, (0,)), "comm.all_reduce 0 B [0]"),
        (("barrier", 0, (0, 1)), "comm.barrier [0 1]"),
        (("send", 1 << 30), "comm.send 1 GiB"),
        (("all_reduce", 12, tuple(range(64))), "comm.all_reduce 12 B [0-63]"),
        (("all_reduce", 12, tuple(range(0, 64, 8))), "comm.all_reduce 12 B [0 8 16 24 32 40 48 56]"),
    ],
)
def test_names(arguments: Any, name: str) -> None:
    with profiled() as prof, open_range(*arguments):
        pass
    assert names(prof) == [name]


def test_nesting() -> None:
    """Ranges hold what runs in them, as ranges of the user, and are told apart from operators."""
    tensor = torch.ones(4)
    with profiled() as prof:
        with torch.profiler.record_function("step"), open_range("all_reduce", 16, (0,)):
            tensor.add_(1)
        tensor.mul_(2)
    found = {event.name: event for event in prof.events()}
    range_ = found["comm.all_reduce 16 B [0]"]
    assert range_.is_user_annotation
    assert range_.cpu_parent.name == "step"
    assert found["aten::add_"].cpu_parent is range_
    assert found["aten::mul_"].cpu_parent is None


def test_an_error_ends_the_range() -> None:
    with profiled() as prof:
        with pytest.raises(ZeroDivisionError), open_range("send", 1):
            _ = 1 / 0
        with open_range("recv", 1):
            pass
    found = {event.name: event for event in prof.events()}
    assert found["comm.recv 1 B"].cpu_parent is None


def test_the_profiler_starts_and_stops_within_a_range() -> None:
    prof = profiled()
    with open_range("send", 1):
        prof.start()
        with open_range("send", 2):
            prof.stop()
    assert names(prof) in ([], ["comm.send 2 B"])  # torch drops it or cuts it off
    with profiled() as after, open_range("send", 3):
        pass
    assert names(after) == ["comm.send 3 B"]


def test_one_operation_within_another_that_is_alike() -> None:
    with profiled() as prof, open_range("all_reduce", 4, (0,)):
        torch.ones(4)  # torch takes a range that has nothing but one of its own name for one
        with open_range("all_reduce", 4, (0,)):
            pass
    outer, inner = (event for event in prof.events() if event.name.startswith("comm."))
    assert inner.cpu_parent is outer


def test_threads() -> None:
    opened = Ranges().opener("all_reduce", (0, 1))

    def work() -> None:
        for size in range(200):
            with opened(size):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_nothing_is_made_while_nobody_looks() -> None:
    opened = Ranges(["profiler"]).opener("all_reduce", (0, 1))
    assert opened(4) is opened(8)
    with profiled():
        assert opened(4) is not opened(4)
    assert opened(4) is opened(8)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(operations.recorded())),
            st.integers(0, 2**62),
            st.lists(st.integers(0, 99999), unique=True, max_size=50).map(tuple),
            st.booleans(),
        ),
        max_size=50,
    )
)
def test_names_are_bounded(calls: list[tuple[str, int, tuple[int, ...], bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler_ranges, "_MOST_NAMES", 10)
        opening = Ranges(["profiler"])
        for call in calls:
            opening.open(*call)
    few = {name for name in opening._ranges if " ranks" in name or "<=" in name}
    assert len(set(opening._ranges) - few) <= 11
    assert all(len(name) <= 120 and name.isascii() for name in opening._ranges)
    assert len(opening._openers) <= 10


def test_memory_is_bounded() -> None:
    opening = Ranges(["profiler"])
    for size in range(1 << 20, 1 << 24, 4096):
        opening.open("all_reduce", size, (0, 1))
    for rank in range(1, 3000):
        opening.open("all_reduce", 4, (0, rank))
    assert len(opening._ranges) < 1100
    assert len(opening._openers) <= 1024
    assert "comm.all_reduce <=16 MiB 2 ranks" in opening._ranges


def test_kinds() -> None:
    assert available()[0] == "profiler"
    assert set(available()) <= set(KINDS)
    assert Ranges().kinds == available()
    assert Ranges("profiler").kinds == ("profiler",)
    with pytest.raises(ArgumentError, match="got 'itt', expected one of 'profiler', 'nvtx'"):
        Ranges(["itt"])


def test_without_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(torch._C, "_nvtx"):
        pytest.skip("this build of torch has NVTX")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert available() == ("profiler",)
    assert Ranges().kinds == ("profiler",)
    with pytest.raises(BackendUnavailableError, match=r"'nvtx' cannot be had: .*; install the latter with: pip"):
        Ranges(["nvtx"])


PROGRAM = """
from comm_collectives.recorded.profiler_ranges import Ranges
from torch.profiler import ProfilerActivity, profile

ranges = Ranges()
opened = ranges.opener("all_reduce", (0, 1))
for _ in range(2):
    with opened(4096), ranges.open("barrier", 0, (0, 1), True):
        pass
try:
    with opened(8):
        raise KeyError
except KeyError:
    pass
with profile(activities=[ProfilerActivity.CPU]) as prof:
    with opened(4096):
        pass
assert [event.name for event in prof.events()] == ["comm.all_reduce 4 KiB [0 1]"]
"""


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """What ``PROGRAM`` tells a tool that NVTX loads: what happened, and its text."""
    if NO_NVTX:
        pytest.skip("neither torch nor a package nvtx has NVTX here")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("nvtx")
    library, file = folder / "listener.so", folder / "heard"
    command = [compiler, "-std=gnu99", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, LISTENER]
    subprocess.run(command, check=True, timeout=60)
    env = {**os.environ, "NVTX_INJECTION64_PATH": str(library), "NVTX_LISTENER_FILE": str(file)}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120, env=env)
    return [(what, text) for what, _, text in (line.split("\t") for line in file.read_text().splitlines())]


def test_nvtx(heard: list[tuple[str, str]]) -> None:
    large, small, barrier, pop = (
        ("push", "comm.all_reduce 4 KiB [0 1]"),
        ("push", "comm.all_reduce 8 B [0 1]"),
        ("push", "comm.barrier [0 1] async"),
        ("pop", ""),
    )
    found = [one for one in heard if one[0] in ("push", "pop")]
    assert found == [large, barrier, pop, pop] * 2 + [small, pop] + [large, pop]


of_the_package = pytest.mark.skipif(
    hasattr(torch._C, "_nvtx") or NO_NVTX, reason="torch has NVTX of its own, or the package nvtx is not installed"
)


@of_the_package
def test_strings_are_registered_once(heard: list[tuple[str, str]]) -> None:
    strings = [text for what, text in heard if what == "string"]
    assert strings == ["comm.all_reduce 4 KiB [0 1]", "comm.barrier [0 1] async", "comm.all_reduce 8 B [0 1]"]
    assert [text for what, text in heard if what == "category"] == ["all_reduce", "barrier"]


@of_the_package
@pytest.mark.skipif("NVTX_INJECTION64_PATH" in os.environ, reason="a tool listens")
def test_nothing_is_made_where_no_tool_listens() -> None:
    opened = Ranges(["nvtx"]).opener("all_reduce", (0, 1))
    assert opened(4) is opened(8)


@of_the_package
def test_nvtx_is_turned_off() -> None:
    program = "from comm_collectives.recorded.profiler_ranges import *; print(available()); Ranges('nvtx')"
    env = {**os.environ, "NVTX_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=120)
    assert done.stdout == "('profiler',)\n"
    assert "ranges: 'nvtx' cannot be had: the variable NVTX_DISABLE turns it off; unset it" in done.stderr
