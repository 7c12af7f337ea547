"""Hooks of training from a configuration: the one call, and settings that are stored for later."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import comm_orchestrator as dist
from comm_utils.errors import ArgumentError, CommError
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]

pytestmark = pytest.mark.cpu

DOCUMENT = {
    "train_batch_size": 8,
    "gradient_predivide_factor": 2.0,
    "sparse_gradients": True,
    "zero_optimization": {"stage": 0, "reduce_bucket_size": 20, "overlap_comm": False},
}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def averages(model: nn.Module) -> bool:
    """Return whether a backward leaves the average over all ranks."""
    model.zero_grad()
    model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
    mine = next(model.parameters()).grad
    assert mine is not None
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return all(torch.equal(one, mine) for one in everyones)


def in_one_call(config: Any) -> None:
    model = net()
    with pytest.raises(CommError):
        dist.get_rank()
    handle = dist.initialize_module(config, model)
    try:
        assert isinstance(handle, dist.hooks.DataParallel)
        assert handle.options.reduction == dist.hooks.GradientReduction(predivide_factor=2.0)
        assert (handle.options.bucket_size_bytes, handle.options.overlap) == (80, False)
        assert averages(model)
        assert [len(one) for one in handle.buckets] == [2, 2]
    finally:
        dist.destroy_process_group()


def test_the_one_call_sets_up_everything(bare_pools: Pools, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DOCUMENT))
    for config in ({**DOCUMENT, "process_group": {"backend": "gloo"}}, str(path)):
        bare_pools(2).run(in_one_call, config)


def with_every_kind_of_model() -> None:
    W = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (W,), mesh_dim_names=("dp",))
    model = net()
    for where in (None, mesh, mesh.get_group()):
        handle = dist.initialize_module(model=model, mesh=where)
        assert handle is not None
        assert averages(model)
        handle.remove()
    with dist.register_sharded_hooks(model, 2, mesh.get_group(), bucket_size_bytes=100) as sharded:
        assert isinstance(sharded, dist.hooks.Sharded)
        assert sharded.stage == 2
        with pytest.raises(ArgumentError, match="register_sharded_hooks: opitons: got an argument of this name"):
            dist.register_sharded_hooks(model, 2, opitons={})
    assert dist.initialize_module({"prescale_gradients": True}, DistributedDataParallel(model)) is None
    square = dist.init_device_mesh("cpu", (1, W), mesh_dim_names=("x", "y"))
    register = dist.register_data_parallel_hooks
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("mesh: got one without a model", lambda: dist.initialize_module(mesh=mesh)),
        ("model: got str; expected a torch.nn.Module", lambda: dist.initialize_module(model="net")),  # type: ignore[arg-type]
        ("mesh: got int; expected a DeviceMesh", lambda: dist.initialize_module(model=model, mesh=3)),
        (r"dimensions \('x', 'y'\); expected one that is", lambda: dist.initialize_module(model=model, mesh=square)),
        (
            "got a DistributedDataParallel together with stage 2",
            lambda: dist.initialize_module({"training": {"stage": 2}}, DistributedDataParallel(model)),
        ),
        (
            "config: got stage 1; expected 0",
            lambda: dist.register_data_parallel_hooks(model, {"training": {"stage": 1}}),
        ),
        (
            "group: got one with a configuration alone",
            lambda: dist.register_data_parallel_hooks({}, group=mesh.get_group()),
        ),
        ("training.stage: got 9", lambda: dist.register_communication_hooks({"training": {"stage": 9}})),
        ("opitons: got an argument of this name", lambda: register(model, opitons={})),  # type: ignore[call-arg]
    ]
    for message, call in wrong:
        with pytest.raises(CommError, match=message):
            call()


def test_models_and_meshes(pools: Pools) -> None:
    pools(2).run(with_every_kind_of_model)


def removed_after_tensor_parallel(stage: int) -> None:
    mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model, alone = net(), net()
    alone.load_state_dict(model.state_dict())
    plan = {"0": "column", "1": "row"}
    handle: Any = dist.initialize_module({"training": {"stage": stage, "model_parallel_plan": plan}}, model, mesh)
    optimizers = [
        torch.optim.SGD(handle.parameter_groups() if stage else model.parameters(), lr=0.1),
        torch.optim.SGD(alone.parameters(), lr=0.1),
    ]
    if stage:
        handle.attach(optimizers[0])
    assert sum(one.numel() for one in model.parameters()) < 40
    for one in (model, alone):
        one(torch.arange(8.0).view(2, 4)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    handle.remove()
    for (name, one), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, expected, msg=lambda text, name=name: f"stage {stage}: {name}: {text}")
    for one in (model, alone):
        one.zero_grad()
        one(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(model(torch.ones(2, 4)), alone(torch.ones(2, 4)))


def test_removal_gives_the_whole_model_back(pools: Pools) -> None:
    for stage in (0, 1, 2, 3):
        pools(2).run(removed_after_tensor_parallel, stage)


def with_three_weights_in_one() -> None:
    W, rank = dist.get_world_size(), dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (1, W), mesh_dim_names=("data", "tensor"))
    config = {"training": {"model_parallel_plan": {"0": ["column", 3]}}}
    rows = torch.arange(6 * W).view(3, W, 2)[:, rank].flatten()  # of each of the three weights, this rank's part
    for is_stored in (False, True):
        model = nn.Sequential(nn.Linear(4, 6 * W, bias=False))
        whole = torch.arange(24.0 * W).view(6 * W, 4)
        model.load_state_dict({"0.weight": whole})
        if is_stored:
            dist.register_communication_hooks(config)
            handle = dist.register_model_parallel_hooks(model, mesh)
        else:
            handle = dist.initialize_module(config, model, mesh)
        assert torch.equal(model[0].weight, whole[rows])
        handle.remove()
        assert torch.equal(model[0].weight, whole)
    dist.register_communication_hooks({})


def test_plans_have_weights_of_several_parts(pools: Pools) -> None:
    pools(2).run(with_three_weights_in_one)


def stored() -> None:
    model = net()

    def factor() -> float:
        with dist.register_data_parallel_hooks(model) as handle:
            return float(handle.options.reduction.predivide_factor)

    assert factor() == 1.0
    assert dist.register_data_parallel_hooks({"gradient_predivide_factor": 4}) is None
    assert factor() == 4.0
    assert dist.register_communication_hooks(DOCUMENT) is None
    assert factor() == 2.0
    with dist.register_data_parallel_hooks(model, {"gradient_predivide_factor": 8}) as handle:
        assert handle.options.reduction.predivide_factor == 8.0
    with dist.register_data_parallel_hooks(model, dist.hooks.DataParallelOptions(overlap=False)) as handle:
        assert handle.options.reduction.predivide_factor == 1.0
    assert dist.initialize_module({"gradient_predivide_factor": 16}) is None
    assert factor() == 16.0
    dist.register_data_parallel_hooks({})
    assert factor() == 1.0
    for store in (dist.register_communication_hooks, dist.initialize_module):
        store({"training": {"stage": 2}})
        with pytest.raises(
            ArgumentError, match=r"hooks: stored settings: got stage 2; expected 0: initialize_module\("
        ):
            dist.register_data_parallel_hooks(model)
        with dist.register_data_parallel_hooks(model, {}) as handle:
            assert handle.options.reduction.predivide_factor == 1.0
    dist.register_data_parallel_hooks({})
    assert factor() == 1.0
    assert dist.register_model_parallel_hooks({"training": {"model_parallel_plan": {"0": "column"}}}) is None
    with pytest.raises(ArgumentError, match="plan: got one with a configuration alone"):
        dist.register_model_parallel_hooks({}, plan={"0": "column"})
    dist.register_model_parallel_hooks({})


def test_stored_settings_are_those_of_later_calls(pools: Pools) -> None:
    pools(2).run(stored)


def stored_by_the_environment(path: str) -> None:
    model = net()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMM_CONFIG", path)
        patch.setenv("COMM_TRAINING__OVERLAP_COMM", "true")
        for before in (None, {"gradient_predivide_factor": 4}):
            try:
                dist.init_distributed(dist_backend="gloo", verbose=False)
                if before is not None:
                    dist.register_data_parallel_hooks(before)
                assert dist.initialize_module() is None
                with dist.register_data_parallel_hooks(model) as handle:
                    assert handle.options.reduction.predivide_factor == (4.0 if before else 2.0)
                    assert handle.options.overlap
            finally:
                dist.destroy_process_group()


def test_settings_of_the_environment_are_stored(bare_pools: Pools, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DOCUMENT))
    bare_pools(2).run(stored_by_the_environment, str(path))
