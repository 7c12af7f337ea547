"""Ranks that are bound to cores, for real and by a recorded topology."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_backend_ccl import oneccl_library, placement, shared_communicator
from comm_utils import topology
from comm_utils.testing import run_ranks

_FOUND = dist.available_backends()["ccl"]
pytestmark = [
    pytest.mark.skipif(
        "between" not in _FOUND.details.get("shared memory", ""),
        reason=_FOUND.details.get("shared memory", _FOUND.reason),
    ),
    pytest.mark.skipif(len(topology.allowed_cpus()) < 2, reason="needs two cores"),
]
FIRST, SECOND = sorted(topology.allowed_cpus())[:2] if len(topology.allowed_cpus()) > 1 else (0, 1)


def groups() -> list[shared_communicator.SharedCommunicator]:
    """Return this rank's groups in shared memory, the world first."""
    return sorted(shared_communicator.open_groups(), key=lambda one: not one.is_world)


def find_oversubscribed(cpus: list[set[int]]) -> bool:
    """Return whether the world is oversubscribed, where each rank is bound to its ``cpus``."""
    os.sched_setaffinity(0, cpus[int(os.environ["RANK"])])
    dist.init_distributed("ccl", verbose=False)
    W = dist.get_world_size()
    for step in range(200):
        dist.all_reduce(tensor := torch.full((3,), float(step + dist.get_rank())))
        assert tensor.tolist() == [W * step + W * (W - 1) / 2] * 3
    (world,) = groups()
    oversubscribed = world.oversubscribed
    dist.destroy_process_group()
    return oversubscribed


@pytest.mark.parametrize(
    ("cpus", "oversubscribed"),
    [
        ([{FIRST}] * 4, True),
        ([{FIRST}] * 2, True),
        ([{FIRST, SECOND}] * 3, True),
        ([{FIRST, SECOND}] * 2, False),
        ([{FIRST}, {SECOND}], False),
        ([{FIRST, SECOND}, {SECOND}], False),
    ],
)
def test_the_binding_decides_whether_ranks_are_oversubscribed(
    rank_environment: dict[str, Any], cpus: list[set[int]], oversubscribed: bool
) -> None:
    found = run_ranks(find_oversubscribed, len(cpus), cpus, timeout_s=60, env=rank_environment)
    assert found == [oversubscribed] * len(cpus)


def find_oversubscribed_pair() -> bool:
    """Return whether a pair is oversubscribed, where the host has more ranks than this process may use cores."""
    os.sched_setaffinity(0, {FIRST, SECOND})
    topology.cpus_of_launcher = topology.allowed_cpus  # as of a launcher that is bound to these itself
    dist.init_distributed("ccl", verbose=False)
    rank = dist.get_rank()
    pair = dist.new_group([rank - rank % 2, rank - rank % 2 + 1])
    dist.barrier(pair)
    (found,) = [one.oversubscribed for one in groups() if not one.is_world]
    dist.barrier()  # rank 0, which holds the store, may leave when both pairs are made
    dist.destroy_process_group()
    return found


def test_pairs_of_an_oversubscribed_host_are_oversubscribed(rank_environment: dict[str, Any]) -> None:
    assert run_ranks(find_oversubscribed_pair, 4, timeout_s=60, env=rank_environment) == [True] * 4


def test_the_cores_of_a_launcher_that_is_bound() -> None:
    ask = "from comm_utils import topology; print(sorted(topology.cpus_of_launcher()))"
    bind = f"import os, subprocess, sys; os.sched_setaffinity(0, [{FIRST}])"
    code = f"{bind}; subprocess.run([sys.executable, '-c', {ask!r}], check=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == f"[{FIRST}]"


def find_oversubscribed_on_oneccl(cpus: list[int]) -> bool:
    os.sched_setaffinity(0, {cpus[int(os.environ["RANK"])]})
    said: list[bool] = []
    initialize = oneccl_library.initialize

    def listen(local_rank: int, local_size: int, interface: str, oversubscribed: bool) -> None:
        said.append(oversubscribed)
        initialize(local_rank, local_size, interface, oversubscribed)

    oneccl_library.initialize = listen
    dist.init_distributed("ccl", verbose=False)
    dist.all_reduce(tensor := torch.ones(3))
    assert tensor.tolist() == [2.0] * 3
    dist.destroy_process_group()
    return said[0]


@pytest.mark.skipif(oneccl_library.unavailable_reason() is not None, reason=str(oneccl_library.unavailable_reason()))
def test_the_binding_decides_on_oneccl_too(rank_environment: dict[str, Any]) -> None:
    env = {**rank_environment, "CCL_SHARED_MEMORY": "0"}
    assert run_ranks(find_oversubscribed_on_oneccl, 2, [FIRST, SECOND], timeout_s=60, env=env) == [False] * 2
    assert run_ranks(find_oversubscribed_on_oneccl, 2, [FIRST, FIRST], timeout_s=60, env=env) == [True] * 2


# --- a topology that this machine has not


def recorded(root: Path) -> Path:
    """Write two sockets of two cores."""
    for cpu in range(4):
        here, cores = root / f"devices/system/cpu/cpu{cpu}", "0-1" if cpu < 2 else "2-3"
        for name, text in {
            "topology/thread_siblings_list": str(cpu),
            "topology/physical_package_id": str(cpu // 2),
            "cache/index0/level": "3",
            "cache/index0/shared_cpu_list": cores,
        }.items():
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            (here / name).write_text(text + "\n")
        node = root / f"devices/system/node/node{cpu // 2}"
        node.mkdir(parents=True, exist_ok=True)
        (node / "cpulist").write_text(cores + "\n")
    return root


#: The core of each rank: neighbours are not next to each other.
CORES = [0, 2, 1, 3]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def everything(group: Any, count: int, dtype: torch.dtype) -> list[bytes]:
    rank, W = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    mine = (torch.randn(count * W, generator=generator) * 10.0 ** (rank * 2)).to(dtype)
    found = []
    for shared in (False, True):
        source = dist.empty_shared(mine.shape, dtype).copy_(mine) if shared else mine.clone()
        large = torch.empty(count * W * W, dtype=dtype)
        dist.all_gather_into_tensor(large, source, group)
        found.append(bits(large))
        dist.all_to_all_single(large[: count * W], source, group=group)
        found.append(bits(large[: count * W]))
        dist.reduce_scatter_tensor(large[:count], source, "sum", group)
        found.append(bits(large[:count]))
        dist.all_reduce(source, "sum", group)
        found.append(bits(source))
    return found


def compare_orders(root: Path) -> tuple[list[int], list[int]]:
    dist.init_distributed("ccl", verbose=False)
    dist.barrier()
    rank = dist.get_rank()
    found = topology.read_placement({CORES[rank]}, root)
    placement.mine = lambda: placement.Place.of(found)
    group = dist.new_group([0, 1, 2, 3])
    for count in (50, 3_000, 90_000):
        for dtype in (torch.float32, torch.bfloat16):
            assert everything(group, count, dtype) == everything(None, count, dtype), (count, dtype)
    orders = [one.reading_order for one in groups()]
    dist.destroy_process_group()
    return orders[0], orders[1]


@pytest.mark.parametrize("transfer", ["cached", "streamed", "single_copy"])
def test_a_recorded_topology_changes_the_order_and_no_bit(
    rank_environment: dict[str, Any], tmp_path: Path, transfer: str
) -> None:
    env = {**rank_environment, "CCL_SHARED_MEMORY_TRANSFER": transfer}
    found = run_ranks(compare_orders, 4, recorded(tmp_path), timeout_s=100, env=env)
    assert [one[0] for one in found] == [[1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2]]
    assert [one[1] for one in found] == [[2, 1, 3], [3, 0, 2], [0, 3, 1], [1, 2, 0]]
