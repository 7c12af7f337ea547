"""Clocks that are wrong, or set while ranks run."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.errors import CollectiveMismatchError, CommTimeoutError
from comm_utils.testing import per_rank, run_ranks

SOURCE = Path(__file__).with_name("clock.c")
HOUR_S = 3600

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what makes a process have the time of day of ``clock.c``."""
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    subprocess.run(["cc", "-std=gnu99", "-shared", "-fPIC", "-o", library, SOURCE], check=True, timeout=60)
    return {"LD_PRELOAD": str(library), "COMM_TESTS_FORK": "0"}


def make_calls_that_differ(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor, "max" if dist.get_rank() else "min")
    while True:  # on gloo, the call ends, and the watch compares it a little later
        time.sleep(0.1)
        dist.barrier()


def with_clocks_apart(backend: str) -> tuple[float, str]:
    dist.init_distributed(backend, verbose=False, timeout=30)
    tensor = torch.ones(100)
    dist.all_reduce(tensor)
    group = dist.new_group([0, 1])
    dist.all_reduce(tensor, "avg", group=group)
    dist.monitored_barrier()
    names: list[Any] = [None, None]
    dist.all_gather_object(names, dist.get_rank())
    assert (tensor[0].item(), names) == (2.0, [0, 1])
    with pytest.raises(CollectiveMismatchError) as caught:
        make_calls_that_differ(tensor)
    return time.time(), str(caught.value)


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_hosts_whose_clocks_differ(clock: dict[str, str], backend: str, rank_environment: dict[str, Any]) -> None:
    env = {**rank_environment, **clock, "CLOCK_AHEAD_S": per_rank(["0", str(-HOUR_S)])}
    (here, first), (there, second) = run_ranks(with_clocks_apart, 2, backend, env=env)
    assert here - there == pytest.approx(HOUR_S, abs=60)
    for text in (first, second):
        assert "op min" in text
        assert "op max" in text


def wait_beyond_the_timeout(done: Path) -> tuple[str, float]:
    dist.init_distributed("gloo", verbose=False, timeout=3)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    begun = time.monotonic()
    if dist.get_rank() == 1:
        while not done.exists():
            time.sleep(0.05)
        return "", 0.0
    with pytest.raises(CommTimeoutError) as caught:
        dist.all_reduce(tensor)
    took_s = time.monotonic() - begun
    done.touch()
    return str(caught.value), took_s


def test_a_call_ends_although_the_clock_was_set_back(
    clock: dict[str, str], tmp_path: Path, rank_environment: dict[str, Any]
) -> None:
    env = {**rank_environment, **clock, "CLOCK_AHEAD_S": str(HOUR_S)}
    (text, took_s), _ = run_ranks(wait_beyond_the_timeout, 2, tmp_path / "done", env=env)
    assert 3 < took_s < 60
    assert "the timeout of the group of ranks [0, 1] is 3 s; the system's clock may have been set back" in text
    assert "rank 1 (" in text
    assert "has not called all_reduce" in text
