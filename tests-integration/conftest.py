"""Ranks that all tests of this folder share: to start one costs seconds, to call one that runs costs nothing."""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.distributed.distributed_c10d import _world

import comm_orchestrator as dist
from comm_utils.testing import RankPool, allow_interrupts, preload, sharing_device
from comm_utils.testing.environment import PortReservation

# The modules beside the tests are in no package that could be installed. Ranks get this path as well, and find the
# functions of `tests-integration.test_...` there that a helper of another module is to call.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent))

allow_interrupts()
preload("torch.distributed.tensor", "torch._dynamo", "pytest", "hypothesis", "comm_orchestrator.facade")

# A busy machine is no reason to fail; `--hypothesis-profile=thorough` tries ten times as many examples.
settings.register_profile("usual", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("usual"), max_examples=1000)
settings.load_profile("usual")

Pools: TypeAlias = Callable[[int], RankPool]

#: Where tensors of ``pools`` live that name no device: "cpu", or "cuda" in ``nox -s gpu``.
DEVICE = os.environ.get("TESTS_DEVICE", "cpu")
#: What ``pools`` run on.
BACKEND = os.environ.get("TESTS_BACKEND", "gloo" if DEVICE == "cpu" else f"cpu:gloo,{DEVICE}:nccl")

# Neither a GPU, unless it is asked for, nor the settings of the person who runs the tests decide what happens.
ENVIRONMENT: dict[str, Any] = {
    **({"CUDA_VISIBLE_DEVICES": ""} if DEVICE == "cpu" else {}),
    # Groups neither measure the host nor start from what another test found.
    "CCL_SHARED_MEMORY_PROFILE": "0",
    **{name: None for name in os.environ if name.startswith("COMM_") or name == "DEEPSPEED_TIMEOUT"},
    # How ranks compare calls: "strict" for comparisons before any data moves.
    **({"COMM_CHECKS__MISMATCH": os.environ["TESTS_MISMATCH"]} if "TESTS_MISMATCH" in os.environ else {}),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gloo")
    if marker is not None and BACKEND != "gloo":
        pytest.skip(f"of gloo alone: {marker.args[0]}")
    if DEVICE != "cpu" and item.get_closest_marker("cpu") is not None:
        pytest.skip("of CPU tensors alone")


def set_up() -> None:
    dist.init_distributed(dist_backend=BACKEND, verbose=False)
    if DEVICE != "cpu":
        torch.set_default_device(torch.device(DEVICE, torch.cuda.current_device()))
    atexit.register(dist.destroy_process_group)  # without it, torch 2.6 may abort at the end


#: All pools of this process.
POOLS: list[RankPool] = []


def _pools(setup: Callable[[], None] | None) -> Iterator[Pools]:
    with ExitStack() as stack:
        started: dict[int, RankPool] = {}

        def pool(world_size: int) -> RankPool:
            if world_size not in started:
                shared = DEVICE != "cpu" and world_size > torch.cuda.device_count()
                env = {**ENVIRONMENT, **(sharing_device(world_size) if shared else {})}
                started[world_size] = stack.enter_context(RankPool(world_size, env=env, setup=setup))
                POOLS.append(started[world_size])
            return started[world_size]

        yield pool


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """``pools(W)``: W ranks, set up on ``TESTS_BACKEND``, or gloo. What a test changes there, it puts back."""
    yield from _pools(set_up)


@pytest.fixture(scope="session")
def bare_pools() -> Iterator[Pools]:
    """``bare_pools(W)``: W ranks that torchrun could have started, nothing set up. Tests destroy what they set up."""
    yield from _pools(None)


@pytest.fixture(scope="module")
def fresh_pools() -> Iterator[Pools]:
    """As ``bare_pools``, of processes that no other module has used."""
    yield from _pools(None)


def destroy_groups() -> None:
    """Destroy all groups that ``new_group`` has made, in a rank; the library keeps some of its own for the world."""
    if dist.is_initialized():
        for group in [one for one in _world.pg_map if re.fullmatch(r"comm-[0-9a-f]{16}-\d+", one.group_name)]:
            with suppress(dist.CommError):
                dist.destroy_process_group(group)


@pytest.fixture(scope="module", autouse=True)
def no_groups_are_left() -> Iterator[None]:
    """A group on gloo has a thread that wakes a hundred times a second: a module's groups end with it."""
    yield
    for pool in POOLS:
        if pool.is_running:
            pool.run(destroy_groups)


@pytest.fixture(scope="session")
def rank_environment() -> dict[str, Any]:
    """``env`` for ranks that a test starts itself."""
    return ENVIRONMENT


@pytest.fixture
def free_port() -> Iterator[int]:
    """A TCP port that nobody else takes."""
    reservation = PortReservation()
    yield reservation.port
    reservation.close()
