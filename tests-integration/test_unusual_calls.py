"""Calls that look wrong and work: tensors of any strides that are only read, empty tensors, unusual dtypes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.testing import RankPool

# Test folders are no packages that could be installed.
_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

from wrong_calls.kinds import recast, replaced  # noqa: E402
from wrong_calls.right import MESSAGES, REDUCING, TENSORS, call, check_group_works, places, right  # noqa: E402

Pools: TypeAlias = Callable[[int], RankPool]

ONLY_READ = [
    (name, where, ranks)
    for name in TENSORS
    if name not in MESSAGES
    for where, ranks, written in places(name)
    if not written
]


def run_strided_input(name: str, where: str, ranks: tuple[int, ...]) -> None:
    rank = dist.get_rank()
    for _ in range(3):  # the second and the third may take the fast path
        arguments = right(name, rank, 2)
        if rank in ranks:
            argument, _, position = where.rstrip("]").partition("[")
            whole = arguments[argument][int(position)] if position else arguments[argument]
            arguments.update(replaced(arguments, where, torch.ones(2 * whole.numel())[::2]))
        call(name, arguments)
    check_group_works()


@pytest.mark.parametrize(("name", "where", "ranks"), ONLY_READ)
def test_strided_tensor_that_is_only_read_is_accepted(
    pools: Pools, name: str, where: str, ranks: tuple[int, ...]
) -> None:
    pools(2).run(run_strided_input, name, where, ranks)


def emptied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value[:0].clone()
    if isinstance(value, dict):
        return {name: emptied(entry) for name, entry in value.items()}
    return [emptied(entry) for entry in value] if isinstance(value, list) else value


def one_of_two(name: str) -> str:
    """What this rank calls so that messages have both ends."""
    return {"send": "recv", "isend": "irecv"}.get(name, name) if dist.get_rank() == 1 else name


def run_zero_sized(name: str) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    name = one_of_two(name)
    for dtype in (torch.float32, torch.int16, torch.bool):
        arguments = recast(emptied(right(name, rank, W)), dtype)
        if name in REDUCING:
            arguments["op"] = "sum"
        call(name, arguments)
        if name not in ("inference_all_reduce", *MESSAGES):
            call(name, {**arguments, "async_op": True})
    check_group_works()


@pytest.mark.parametrize("name", [name for name in TENSORS if name not in ("recv", "irecv")])
def test_zero_sized_tensors(pools: Pools, name: str) -> None:
    pools(2).run(run_zero_sized, name)


def run_moving(name: str, dtype: torch.dtype) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    name = one_of_two(name)
    call(name, recast(right(name, rank, W), dtype))
    check_group_works()


UNUSUAL = [torch.float8_e4m3fn, torch.complex32, torch.complex64, torch.uint16, torch.uint64, torch.bool]
MOVING = [name for name in TENSORS if name not in REDUCING and name not in ("recv", "irecv")]


@pytest.mark.parametrize("dtype", UNUSUAL, ids=str)
@pytest.mark.parametrize("name", MOVING)
def test_movement_takes_every_dtype(pools: Pools, name: str, dtype: torch.dtype) -> None:
    pools(2).run(run_moving, name, dtype)


def run_complex(name: str, op: str) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    arguments = recast(right(name, rank, W), torch.complex64)
    for value in arguments.values():
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(complex(rank, 2))
    result = getattr(dist, name)(**arguments, op=op)
    outputs = {"reduce_scatter_coalesced": result, "all_reduce_coalesced": arguments.get("tensors")}.get(
        name, [arguments.get("output", arguments.get("tensor"))]
    )
    expected = {"sum": complex(W * (W - 1) / 2, 2 * W), "avg": complex((W - 1) / 2, 2)}[op]
    if name == "reduce" and rank != 0:
        expected = complex(rank, 2)
    assert outputs
    for output in outputs:
        assert output.tolist() == [expected] * 4
    check_group_works()


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("name", REDUCING)
def test_complex_sums_and_averages(pools: Pools, name: str, op: str) -> None:
    pools(2).run(run_complex, name, op)


# --- reduce only reads the tensor of other ranks than dst


def run_reduce_of_any_strides(dtype: torch.dtype, async_op: bool) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    values = torch.arange(1, 13).view(3, 4).to(dtype) if dtype is not torch.bool else torch.ones(3, 4, dtype=dtype)
    wide = torch.zeros(3, 8, dtype=dtype)
    wide[:, ::2] = values
    layouts = [values.clone(), wide[:, ::2], values.t().contiguous().t(), values[:1].expand(3, 4)]
    for dst in range(W):
        mine = layouts[(rank - dst) % W]  # contiguous on dst
        if rank == dst:
            mine = (values.clone(), values.t().contiguous().t())[dst % 2]  # or dense, in another order than others
        before, memory = mine.clone(), wide.clone()
        work = dist.reduce(mine, dst, "sum", async_op=async_op)
        if work is not None:
            work.wait()
        if rank == dst:
            expected = sum(layouts[1:W], start=values)
            assert torch.equal(mine, expected), (dst, mine, expected)
        else:
            assert torch.equal(mine, before)
        assert torch.equal(wide, memory)
    check_group_works()


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex64], ids=str)
def test_reduce_reads_tensors_of_any_strides(pools: Pools, dtype: torch.dtype, async_op: bool) -> None:
    pools(4).run(run_reduce_of_any_strides, dtype, async_op)
