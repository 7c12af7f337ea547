"""Groups from sizes and from meshes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import comm_orchestrator as dist
from comm_collectives.hooks import ParallelGroups
from comm_utils.errors import ArgumentError, ArgumentTypeError, CollectiveMismatchError
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]


def from_sizes() -> dict[str, tuple[str, tuple[int, ...]]]:
    rank = dist.get_rank()
    groups = ParallelGroups.from_sizes(data=2, tensor=2, expert=2)
    for axis, one in groups.axes.items():
        tensor = torch.tensor([1.0 + rank])
        dist.all_reduce(tensor, group=one.group)
        assert tensor.item() == sum(1.0 + member for member in one.ranks), axis
        assert dist.get_rank(one.group) == one.rank
        assert dist.get_world_size(one.group) == one.size
        assert one.ranks[one.rank] == rank
    assert groups.tensor.group.group_desc == groups.tensor.name
    assert f"rank {rank} is in data parallel {rank % 2}" in str(groups)
    assert repr(groups) == "<ParallelGroups data 2 * pipeline 1 * context 1 * tensor 2 = 4 ranks; expert 2 of data 2>"
    mesh = groups.to_mesh()
    assert mesh.mesh_dim_names == ("pipeline", "data", "context", "tensor")
    assert mesh.get_group("tensor") is groups.tensor.group
    again = ParallelGroups.from_mesh(mesh)
    assert {axis: one.ranks for axis, one in again.axes.items() if axis not in ("expert", "expert_data")} == {
        axis: one.ranks for axis, one in groups.axes.items() if axis not in ("expert", "expert_data")
    }
    assert again.tensor.group is groups.tensor.group
    return {axis: (one.name, one.ranks) for axis, one in groups.axes.items()}


def test_sizes_give_named_groups_and_a_mesh(pools: Pools) -> None:
    found = pools(4).run(from_sizes)
    assert found[3]["tensor"] == ("tensor parallel 1", (2, 3))
    assert found[3]["data"] == ("data parallel 1", (1, 3))
    assert found[1]["expert"] == ("expert parallel 1", (1, 3))
    assert found[1]["expert_data"] == ("expert data parallel 1", (1,))
    assert found[2]["model"] == ("model parallel 1", (2, 3))
    assert found[2]["data_context"] == ("data and context parallel 0", (0, 2))
    assert found[0]["pipeline"] == ("pipeline parallel 0", (0,))


def orders() -> list[object]:
    groups = ParallelGroups.from_sizes(pipeline=2, tensor=2)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "stages"))
    other = ParallelGroups.from_mesh(mesh, names={"pipeline": "stages"})
    assert other.tensor.group is mesh.get_group("tp")
    experts = ParallelGroups.from_mesh(dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")))
    return [
        groups.pipeline.ranks,
        groups.ranks_along("tensor"),
        other.pipeline.ranks,
        other.ranks_along("tensor"),
        experts.data.ranks,
        experts.expert.ranks,
        experts.expert_data.ranks,
    ]


def descending() -> None:
    mesh = DeviceMesh("cpu", torch.tensor([[3, 2], [0, 1]]), mesh_dim_names=("dp", "pp"))
    groups = ParallelGroups.from_mesh(mesh)
    for one in (groups.data, groups.pipeline):
        assert tuple(dist.get_process_group_ranks(one.group)) == one.ranks
        assert dist.get_rank(one.group) == one.rank
    assert (groups.pipeline.group is mesh.get_group("pp")) == (dist.get_rank() < 2)


def test_ranks_of_a_mesh_may_descend(pools: Pools) -> None:
    pools(4).run(descending)


def test_meshes_keep_their_order_and_groups(pools: Pools) -> None:
    found = pools(4).run(orders)
    assert found[1] == [(1, 3), [(0, 1), (2, 3)], (0, 1), [(0, 2), (1, 3)], (0, 1, 2, 3), (0, 1), (1, 3)]


def refusals() -> list[str]:
    rank = dist.get_rank()
    found = []
    for sizes in (
        {"data": 2, "pipeline": 2, "tensor": 2},
        {"tensor": 2},
        {"data": 3, "expert": 2},
        {"context": 0},
        {"tensor": "2"},
        {"data": 3} if rank == 1 else {"pipeline": 3},
        {"data": 3} if rank == 1 else {"pipeline": 2},
    ):
        with pytest.raises((ArgumentError, CollectiveMismatchError)) as caught:
            ParallelGroups.from_sizes(**sizes)  # type: ignore[arg-type]
        found.append(str(caught.value))
    for mesh in (
        dist.init_device_mesh("cpu", (3,)),
        dist.init_device_mesh("cpu", (3,), mesh_dim_names=("columns",)),
        dist.init_device_mesh("cpu", (3, 1), mesh_dim_names=("tp", "tensor")),
    ):
        with pytest.raises(ArgumentError) as wrong:
            ParallelGroups.from_mesh(mesh)
        found.append(str(wrong.value))
    with pytest.raises(ArgumentTypeError, match="mesh: got 3; expected a DeviceMesh"):
        ParallelGroups.from_mesh(3)  # type: ignore[arg-type]
    groups = ParallelGroups.from_sizes(data=3)
    with pytest.raises(ArgumentError, match="axis: got 'rows'; expected one of data, pipeline"):
        groups.ranks_along("rows")
    return found


def test_wrong_sizes_are_refused_with_the_arithmetic(pools: Pools) -> None:
    expected = [
        "got data 2 * pipeline 2 * context 1 * tensor 2 = 8 ranks; expected 3, the world size",
        "got pipeline 1 * context 1 * tensor 2 = 2, which does not divide the world size, 3",
        "expert: got 2; expected a divisor of data, 3",
        "context: got 0; expected an integer of 1 or more",
        "tensor: got '2'; expected an integer",
        "data: got 3 on rank 1 and 1 on rank 0; expected the same on all ranks",
        "does not divide the world size, 3",
        "got one whose dimensions have no names",
        "got a dimension 'columns'; expected names among pipeline, data",
        "got two dimensions for tensor: 'tp', 'tensor'",
    ]
    for found in pools(3).run(refusals):
        for text, part in zip(found, expected, strict=True):
            assert part in text, text


def logged() -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("comm")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        ParallelGroups.from_sizes(tensor=2)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return lines


def test_names_are_in_the_log(pools: Pools) -> None:
    first, second = pools(2).run(logged)
    assert any("data 1 * pipeline 1 * context 1 * tensor 2 = 2 ranks" in line for line in first)
    assert any("rank 1 is in tensor parallel 0 (ranks 0, 1)" in line for line in second)


def late() -> str:
    groups = ParallelGroups.from_sizes(tensor=2, timeout=1.0)
    if dist.get_rank() == 1:
        time.sleep(3)  # in the barrier already, it would be found to use the groups in another order
        dist.barrier()
        return ""
    try:
        with pytest.raises(dist.CommTimeoutError) as caught:
            dist.all_reduce(torch.ones(2), group=groups.tensor.group)
    finally:
        dist.barrier()
    return str(caught.value)


def test_names_are_in_errors(pools: Pools) -> None:
    text = pools(2).run(late)[0]
    assert text.startswith("all_reduce on the group of ranks [0, 1] (tensor parallel 0) timed out after 1 s"), text
