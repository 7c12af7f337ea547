"""Errors on ccl name the call that the user made, on the rank that comes late as well."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_collectives.hierarchy.layout import set_hosts
from comm_utils.errors import CollectiveMismatchError, CommError
from comm_utils.testing import patience, run_ranks

pytestmark = pytest.mark.slow

ENVIRONMENT = {"CCL_SHARED_MEMORY_PROFILE": "0", "CUDA_VISIBLE_DEVICES": ""}
ENGINES = pytest.mark.parametrize("env", [{}, {"CCL_SHARED_MEMORY": "0"}], ids=["shm", "oneccl"])
N = 5000

Call = Callable[[Any], object]


def _whole() -> torch.Tensor:
    return torch.ones(dist.get_world_size() * N)


#: Calls by the names that users know, which take others to the engine.
CALLS: dict[str, Call] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(N), group=group, compression="int8"),
    "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(
        torch.empty(N), _whole(), group=group, compression="int8"
    ),
    "all_reduce_coalesced": lambda group: dist.all_reduce_coalesced([torch.ones(N), _whole()], group=group),
}


def come_late(hosts: tuple[int, ...], folder: str) -> dict[str, str]:
    """Have all ranks give up waiting for the last one, which makes each call then; return their errors."""
    dist.init_distributed("ccl", verbose=False, timeout=60)
    rank, last, found = dist.get_rank(), len(hosts) - 1, {}
    set_hosts(hosts)
    if any(hosts):
        dist.set_hierarchical(0)
    for name, call in CALLS.items():
        group = dist.new_group(timeout=4 * patience())
        call(group)
        given_up = Path(folder, name)
        while rank == last and not given_up.exists():
            time.sleep(0.01)
        with pytest.raises(CommError) as raised:
            call(group)
        if rank == 0:
            given_up.touch()
        found[name] = str(raised.value)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("hosts", [(0, 0), (0, 0, 1, 1)], ids=["one host", "two hosts"])
def test_a_late_rank_reads_the_name_of_its_call(hosts: tuple[int, ...], tmp_path: Path) -> None:
    outcomes = run_ranks(come_late, len(hosts), hosts, str(tmp_path), env=ENVIRONMENT, timeout_s=120 * patience())
    for found in outcomes:
        assert [text.split()[0] for text in found.values()] == list(found)


def differ() -> dict[str, str]:
    """Have rank 1 make another call than rank 0; return the errors."""
    dist.init_distributed("ccl", verbose=False, timeout=60)
    found = {}
    groups = [dist.new_group() for _ in CALLS]  # after a failure, oneCCL makes no more
    for group, (name, call) in zip(groups, CALLS.items(), strict=True):
        try:
            if dist.get_rank() == 0:
                call(group)
            else:
                dist.broadcast(torch.ones(7), 0, group)
            dist.barrier(group)
        except CollectiveMismatchError as error:
            found[name] = str(error)
    dist.destroy_process_group()
    return found


@ENGINES
def test_ranks_whose_calls_differ_read_the_names_of_both(env: dict[str, str]) -> None:
    for found in run_ranks(differ, 2, env={**ENVIRONMENT, **env}, timeout_s=120 * patience()):
        assert list(found) == list(CALLS)
        for name, text in found.items():
            assert f"rank 0 calls {name}(" in text or f"rank 0 calls {name}, by way of" in text
