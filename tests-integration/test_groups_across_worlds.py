"""Groups that other code makes of processes of several worlds, as a trainer and the servers that get its weights."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as c10d
from torch.distributed import distributed_c10d as internals

import comm_orchestrator as dist
from comm_utils.flight_recorder.recorder import RECORDER
from comm_utils.testing import RankPool

Pools: TypeAlias = Callable[[int], RankPool]
SIZE = 3
# The watch compares split sizes twice a second.
LOOKS_NS = 700_000_000


def begin(backend: str, folder: str) -> tuple[int, Any]:
    """Begin a world of process 0, the trainer, and one of the others, the servers; return the group of all."""
    process = int(os.environ["RANK"])
    name, rank, size = ("trainer", 0, 1) if process == 0 else ("servers", process - 1, SIZE - 1)
    store = c10d.FileStore(f"{folder}/{name}", size)
    dist.init_distributed(backend, store=store, rank=rank, world_size=size, verbose=False)
    # As OpenRLHF and veRL do.
    made: Any = internals._new_process_group_helper
    shared = c10d.PrefixStore("weights", c10d.FileStore(f"{folder}/weights", SIZE))
    limit = timedelta(seconds=60)
    group, _ = made(SIZE, process, [], internals.Backend(backend), shared, group_name="weights", timeout=limit)
    internals._world.pg_group_ranks[group] = {rank: rank for rank in range(SIZE)}
    return process, group


def end(group: Any) -> None:
    dist.barrier(group)
    dist.destroy_process_group(group)
    dist.destroy_process_group()


def communicate(backend: str, folder: str) -> tuple[Any, ...]:
    process, group = begin(backend, folder)
    named: list[Any] = [f"of {process}"]
    dist.broadcast_object_list(named, 0, group=group)
    parts = [torch.full((2,), float(rank)) for rank in range(SIZE)] if process == 2 else None
    scattered = torch.empty(2)
    dist.scatter(scattered, parts, group_src=2, group=group)
    received = torch.zeros(1)
    if process == 0:
        dist.send(torch.ones(1), group=group, group_dst=1)
    elif process == 1:
        dist.recv(received, group=group, group_src=0)
    dist.monitored_barrier(group, timeout=60)
    mine = torch.tensor([float(process)])
    dist.all_reduce(mine)
    found = dist.get_rank(group), dist.get_rank(), named, scattered.tolist(), received.item(), mine.item()
    end(group)
    return found


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_members_have_the_ranks_of_the_group(bare_pools: Pools, tmp_path: Path, backend: str) -> None:
    found = bare_pools(SIZE).run(communicate, backend, str(tmp_path))
    assert found == [
        (0, 0, ["of 0"], [0, 0], 0, 0),
        (1, 0, ["of 0"], [1, 1], 1, 3),
        (2, 1, ["of 0"], [2, 2], 0, 3),
    ]


def exchange_unevenly(backend: str, folder: str) -> list[float]:
    process, group = begin(backend, folder)
    output = torch.empty(SIZE * process)
    sizes = list(range(SIZE))
    dist.all_to_all_single(output, torch.full((SIZE,), float(process)), [process] * SIZE, sizes, group=group)
    looked = time.perf_counter_ns() + LOOKS_NS
    while process and RECORDER.memory.word("looked_at") < looked:  # a world of one rank has no watch
        time.sleep(0.01)
    end(group)
    return output.tolist()


def test_members_are_not_taken_for_other_processes_of_the_world(bare_pools: Pools, tmp_path: Path) -> None:
    found = bare_pools(SIZE).run(exchange_unevenly, "gloo", str(tmp_path))
    assert found == [[], [0, 1, 2], [0, 0, 1, 1, 2, 2]]


def call_alone(backend: str, folder: str) -> str:
    process, group = begin(backend, folder)
    dist.barrier(group)
    said = ""
    if process == 1:
        try:
            dist.all_reduce(torch.ones(1), group=group, timeout=0.5)
        except dist.CommTimeoutError as error:
            said = str(error)
    mine = torch.ones(1)
    dist.all_reduce(mine)  # the servers' world is whole
    assert mine.item() == (1 if process == 0 else 2)
    dist.destroy_process_group(group)
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_the_remedy_is_that_of_a_group(bare_pools: Pools, tmp_path: Path, backend: str) -> None:
    _, said, _ = bare_pools(SIZE).run(call_alone, backend, str(tmp_path))
    assert "all_reduce on the group of ranks [0, 1, 2] timed out after 0.5 s" in said
    assert "destroy_process_group(group) and a new one" in said


def call_on_unknown_group(backend: str) -> tuple[float, str]:
    """Make a group without a name, as vLLM does for engines that are no ranks of one world."""
    dist.init_distributed(backend, verbose=False)
    rank, store = dist.get_rank(), c10d.HashStore()
    group = c10d.ProcessGroup(store, 0, 1)
    of_cpu = c10d.ProcessGroupGloo(store, 0, 1, timedelta(seconds=60))
    kind = c10d.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, of_cpu)
    tensor = torch.tensor([float(rank)])
    c10d.all_reduce(tensor, group=group)
    with pytest.raises(dist.NotInitializedError) as caught:
        dist.all_reduce(tensor, group=group)
    dist.destroy_process_group()
    return tensor.item(), str(caught.value)


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_a_group_that_torch_does_not_know_is_refused_by_what_it_is(bare_pools: Pools, backend: str) -> None:
    for rank, (found, said) in enumerate(bare_pools(SIZE).run(call_on_unknown_group, backend)):
        assert found == rank
        assert said.startswith("all_reduce: this process group no longer exists, or was made without new_group()")
