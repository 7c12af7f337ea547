"""Ranks compare the tensors that programs pass, also where others travel: of another dtype, or several in one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.errors import CollectiveMismatchError
from comm_utils.testing import run_ranks

pytestmark = pytest.mark.slow

ENVIRONMENT = {"CCL_SHARED_MEMORY_PROFILE": "0", "CUDA_VISIBLE_DEVICES": ""}
BACKENDS = pytest.mark.parametrize(
    ("backend", "env"),
    [("gloo", {}), ("ccl", {"CCL_SHARED_MEMORY": "0"}), ("ccl", {})],
    ids=["gloo", "oneccl", "shm"],
)

Call = Callable[[Any], object]


def _ones(dtype: torch.dtype, elements: int = 4) -> torch.Tensor:
    return torch.ones(elements).to(dtype)


def _reduced(dtype: torch.dtype, elements: int = 4) -> Call:
    return lambda group: dist.all_reduce(_ones(dtype, elements), "max" if dtype is torch.bool else "sum", group)


def _sent(dtype: torch.dtype, elements: int = 4) -> Call:
    return lambda group: dist.broadcast(_ones(dtype, elements), 0, group)


def _gathered(dtype: torch.dtype, elements: int = 4) -> Call:
    whole = _ones(dtype, 2 * elements)
    return lambda group: dist.all_gather_into_tensor(whole, _ones(dtype, elements), group)


def _dtypes() -> dict[str, tuple[Call, Call]]:
    """Calls that are alike once they travel, of two ranks; and what the first rank is said to pass."""
    return {
        "all_reduce bool": (_reduced(torch.bool), lambda group: dist.all_reduce(_ones(torch.uint8), "max", group)),
        "all_reduce complex64": (_reduced(torch.complex64), _reduced(torch.float32, 8)),
        "all_reduce uint16": (_reduced(torch.uint16), _reduced(torch.int16)),
        "broadcast float8_e5m2": (_sent(torch.float8_e5m2), _sent(torch.uint8)),
        "all_gather_into_tensor complex64": (_gathered(torch.complex64), _gathered(torch.float32, 8)),
    }


def _together(call: Callable[[torch.Tensor, Any], object], sizes: tuple[int, int]) -> Call:
    def block(group: Any) -> None:
        with dist.coalescing():
            for size in sizes:
                call(torch.ones(size), group)

    return block


def _joined(sizes: tuple[int, int]) -> dict[str, Call]:
    """Calls with two tensors in one message, of the same size on both ranks."""
    ones = [torch.ones(size) for size in sizes]
    return {
        "all_reduce": _together(lambda one, group: dist.all_reduce(one, group=group), sizes),
        "reduce_scatter_tensor": _together(
            lambda one, group: dist.reduce_scatter_tensor(torch.zeros(one.numel() // 2), one, group=group), sizes
        ),
        "all_gather_into_tensor": _together(
            lambda one, group: dist.all_gather_into_tensor(torch.zeros(2 * one.numel()), one, group), sizes
        ),
        "all_reduce_coalesced": lambda group: dist.all_reduce_coalesced(ones, "sum", group),
        "all_gather_coalesced": lambda group: dist.all_gather_coalesced(
            [torch.zeros(2 * one.numel()) for one in ones], ones, group
        ),
        "reduce_scatter_coalesced": lambda group: dist.reduce_scatter_coalesced(ones, group),
    }


def differ(backend: str) -> dict[str, str]:
    """Make each pair of calls on a group of its own; return the errors by name."""
    dist.init_distributed(backend, timeout=20, verbose=False)
    rank, found = dist.get_rank(), {}
    calls = {name: pair[rank] for name, pair in _dtypes().items()}
    calls |= {f"joined {name}": call for name, call in _joined((2, 6) if rank == 0 else (6, 2)).items()}
    groups = {name: dist.new_group([0, 1]) for name in calls}
    for name, call in calls.items():
        group, found[name] = groups[name], "nothing"
        try:
            _joined((2, 6))["all_reduce_coalesced"](group)  # alike, the second time by the fast path
            _joined((2, 6))["all_reduce_coalesced"](group)
            call(group)
            end = time.monotonic() + 20  # the default reports differences within a second
            while time.monotonic() < end:
                time.sleep(0.1)
                dist.barrier(group)
        except CollectiveMismatchError as error:
            found[name] = str(error)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("mode", ["lazy", "strict"])
@BACKENDS
def test_calls_that_differ_in_what_was_passed_raise(backend: str, env: dict[str, str], mode: str) -> None:
    outcomes = run_ranks(differ, 2, backend, env={**ENVIRONMENT, **env, "COMM_CHECKS__MISMATCH": mode}, timeout_s=240)
    for found in outcomes:
        assert {name for name, text in found.items() if text == "nothing"} == set()
        if backend == "ccl" and not env:
            continue  # the engine's own messages name what travels first
        for name, text in found.items():
            if name.startswith("joined "):
                assert "differ in the sizes of the tensors" in text, name
                assert "of float32 in 2 tensors" in text, name
            else:
                assert f"4 elements of {name.split()[1]}" in text, name


def alike(backend: str) -> None:
    """Make calls that are the same by different ways on two ranks: on one, no tensor is plain."""
    dist.init_distributed(backend, timeout=20, verbose=False)
    odd = dist.get_rank() == 1
    for _ in range(3):
        for size in (3, 5):
            ones = [torch.ones(size), torch.ones(size + 1), torch.ones(4, 2)]
            if odd:
                ones[2] = torch.ones(2, 4).t()
            dist.all_reduce_coalesced(ones)
            assert all((one == 2).all() for one in ones)
        with dist.coalescing(async_op=odd) as work:
            several = [torch.ones(7), torch.ones(2), torch.ones(3, dtype=torch.int64)]
            for one in several:
                dist.all_reduce(one)
        work.wait()
        assert all((one == 2).all() for one in several)
        flags = torch.tensor([odd, True, False])
        work = dist.all_reduce(flags, "max", async_op=odd)
        if odd:
            work.wait()
        assert flags.tolist() == [True, True, False]
        numbers = torch.full((3,), 1 + 1j)
        dist.all_reduce(numbers)
        dist.broadcast(numbers if odd else numbers.clone(), 0)
        assert (numbers == 2 + 2j).all()
        # What travels as bytes, where a rank has no element of its own.
        for dtype in (torch.uint16, torch.complex128):
            parts = [torch.zeros(0, dtype=dtype), torch.zeros(4, dtype=dtype)]
            dist.all_gather(parts, torch.ones(4 if odd else 0, dtype=dtype))
            assert (parts[1] == 1).all()
        dist.barrier()
    time.sleep(1.2)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["lazy", "strict"])
@BACKENDS
def test_calls_that_are_alike_by_different_ways(backend: str, env: dict[str, str], mode: str) -> None:
    run_ranks(alike, 2, backend, env={**ENVIRONMENT, **env, "COMM_CHECKS__MISMATCH": mode}, timeout_s=90)
