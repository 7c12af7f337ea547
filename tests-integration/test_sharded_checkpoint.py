"""State that is saved at one number of ranks and loaded at another, by torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional as F

import comm_orchestrator as dist
from comm_collectives.hooks import register_model_parallel_hooks, register_sharded_hooks
from comm_utils.errors import ArgumentError
from comm_utils.testing import RankPool, preload

# Seconds for each of ten ranks.
preload("torch.distributed.checkpoint.state_dict")

Pools = Callable[[int], RankPool]

BATCH = 24
STEPS = 3


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv1d(2, 3, 3),
        nn.BatchNorm1d(3, momentum=None),
        nn.Flatten(),
        nn.Linear(15, 11),
        nn.Tanh(),
        nn.Linear(11, 1),
    )
    model[5].bias.requires_grad_(False)
    return model.eval()  # the averages of batch normalization are loaded, and stay


def groups_of(model: nn.Sequential) -> list[dict[str, Any]]:
    trained = [one for one in model.parameters() if one.requires_grad]
    return [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in trained if one.dim() == 1], "weight_decay": 0.0},
    ]


def loss_of(model: nn.Module, step: int, rank: int = 0, world_size: int = 1) -> torch.Tensor:
    drawn = torch.randn(BATCH, 2, 7, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
    return F.mse_loss(model(drawn), drawn.sum((1, 2)).sin()[:, None])


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, begin: int, rank: int = 0, world_size: int = 1
) -> list[float]:
    losses = []
    for step in range(begin, begin + STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank, world_size)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if world_size > 1:
            dist.all_reduce(mean, "avg")
        losses.append(mean.item())
    return losses


def make_optimizer(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


def save(folder: str, stage: int) -> list[float]:
    model = make_model()
    model[1].running_mean.fill_(0.25)
    with register_sharded_hooks(model, stage, bucket_size_bytes=300) as handle:
        optimizer = make_optimizer(handle.parameter_groups(groups_of(model)))
        handle.attach(optimizer)
        losses = train(model, optimizer, 0, dist.get_rank(), dist.get_world_size())
        dcp.save(handle.state_dict(optimizer), checkpoint_id=folder)
    return losses


def load_and_go_on(folder: str, stage: int, bucket_size_bytes: int) -> list[float]:
    model = make_model(seed=5)
    with register_sharded_hooks(model, stage, bucket_size_bytes=bucket_size_bytes) as handle:
        optimizer = make_optimizer(handle.parameter_groups(groups_of(model)))
        optimizer.param_groups[0]["lr"] = 7.0  # replaced by the one that was saved
        handle.attach(optimizer)
        before = handle.full_state_dict()
        state = handle.state_dict(optimizer)
        assert not optimizer.state
        after = handle.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        dcp.load(state, checkpoint_id=folder)
        handle.load_state_dict(state, optimizer)
        return train(model, optimizer, STEPS, dist.get_rank(), dist.get_world_size())


def load_without_hooks(folder: str) -> list[float]:
    """One process, with torch's own functions: the checkpoint has the names and shapes of the model."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = make_model(seed=6)
    optimizer = make_optimizer(groups_of(model))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return train(model, optimizer, STEPS)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_goes_on_at_any_number_of_ranks(pools: Pools, tmp_path: Path, stage: int) -> None:
    model = make_model()
    model[1].running_mean.fill_(0.25)
    optimizer = make_optimizer(groups_of(model))
    expected = [train(model, optimizer, begin) for begin in (0, STEPS)]
    for losses in pools(2).run(save, str(tmp_path), stage):
        assert losses == pytest.approx(expected[0], rel=1e-4)
    for world_size, other_stage, size_bytes in ((1, stage, 300), (3, 4 - stage, 1000), (4, stage, 1 << 20)):
        for losses in pools(world_size).run(load_and_go_on, str(tmp_path), other_stage, size_bytes):
            assert losses == pytest.approx(expected[1], rel=1e-4), world_size
    (losses,) = pools(1).run(load_without_hooks, str(tmp_path))
    assert losses == pytest.approx(expected[1], rel=1e-4)


BEFORE_THE_FIRST_STEP: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "NAdam": lambda groups: torch.optim.NAdam(groups, 0.1),
    "Rprop": lambda groups: torch.optim.Rprop(groups, 0.1),
    "ASGD": lambda groups: torch.optim.ASGD(groups, 0.1),
    "SGD": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "Adam": lambda groups: torch.optim.Adam(groups, 0.1),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, 0.1),
    "Adagrad from another value": lambda groups: torch.optim.Adagrad(groups, 0.1, initial_accumulator_value=0.5),
}


def train_from_a_checkpoint_at_step_0(kind: str, folder: str) -> list[list[float]]:
    losses = []
    for is_saved in (False, True):
        model = make_model(seed=int(is_saved))
        with register_sharded_hooks(model, 1 + 2 * is_saved, bucket_size_bytes=300) as handle:
            optimizer = BEFORE_THE_FIRST_STEP[kind](handle.parameter_groups())
            handle.attach(optimizer)
            if not is_saved:
                dcp.save(handle.state_dict(optimizer), checkpoint_id=folder)
                losses.append(train(model, optimizer, 0, dist.get_rank(), dist.get_world_size()))
            state = handle.state_dict(optimizer)
            dcp.load(state, checkpoint_id=folder)
            handle.load_state_dict(state, optimizer)
            losses.append(train(model, optimizer, 0, dist.get_rank(), dist.get_world_size()))
    return losses


@pytest.mark.parametrize("kind", BEFORE_THE_FIRST_STEP)
def test_a_checkpoint_before_the_first_step_changes_no_training(kind: str, pools: Pools, tmp_path: Path) -> None:
    for trained, trained_again, trained_by_others in pools(2).run(
        train_from_a_checkpoint_at_step_0, kind, str(tmp_path)
    ):
        assert trained_again == trained
        assert trained_by_others == pytest.approx(trained, rel=1e-4)


class Counting(nn.Module):
    """Keeps something that is no tensor."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def load_copies(stage: int) -> None:
    model = make_model()
    model.append(Counting())
    with register_sharded_hooks(model, stage, bucket_size_bytes=300) as handle:
        optimizer = make_optimizer(handle.parameter_groups(groups_of(model)))
        handle.attach(optimizer)
        train(model, optimizer, 0, dist.get_rank(), dist.get_world_size())
        model[1].running_mean.fill_(0.25)
        model[-1].count = 7
        saved = io.BytesIO()
        torch.save(handle.state_dict(optimizer), saved)
        saved.seek(0)
        whole, part = handle.full_state_dict(), next(iter(optimizer.state.values()))["exp_avg"].clone()
        for copied in (copy.deepcopy(handle.state_dict(optimizer)), torch.load(saved), {"model": dict(whole)}):
            train(model, optimizer, STEPS, dist.get_rank(), dist.get_world_size())
            model[1].running_mean.fill_(0.5)
            model[-1].count = 8
            handle.load_state_dict(copied, optimizer if "optimizer" in copied else None)
            after = handle.full_state_dict()
            assert after["6._extra_state"] == 7
            assert all(torch.equal(after[name], whole[name]) for name in whole if name != "6._extra_state")
            if "optimizer" in copied:
                assert torch.equal(next(iter(optimizer.state.values()))["exp_avg"], part)
        wrong = {**whole, "0.bias": torch.ones(3, 1)}
        with pytest.raises(ArgumentError, match=r"'0.bias' has a tensor of shape \(3, 1\); expected elements"):
            handle.load_state_dict({"model": wrong})
        with pytest.raises(ArgumentError, match="expected 'model', 'optimizer' or both"):
            handle.load_state_dict(whole)
        model(torch.ones(1, 2, 7))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_and_whole_tensors_are_loaded(pools: Pools, stage: int) -> None:
    pools(2).run(load_copies, stage)


def load_states_of_ranks(stage: int) -> list[str]:
    model = make_model()
    with register_sharded_hooks(model, stage) as handle:
        optimizer = make_optimizer(handle.parameter_groups(groups_of(model)))
        handle.attach(optimizer)
        train(model, optimizer, 0, dist.get_rank(), dist.get_world_size())
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        own = torch.load(file)
        optimizer.load_state_dict(own)
        of_rank_0 = [own]
        dist.broadcast_object_list(of_rank_0, src=0, allow_pickle=True)
        plain = {"state": own["state"], "param_groups": own["param_groups"]}
        found = []
        for state in (
            of_rank_0[0],
            plain,
            {**own, "comm_collectives.part": {**own["comm_collectives.part"], "stage": 9}},
        ):
            try:
                optimizer.load_state_dict(state)
                found.append("")
            except ArgumentError as error:
                found.append(str(error))
        optimizer.load_state_dict({"state": {}, "param_groups": own["param_groups"]})
    optimizer.load_state_dict(plain)
    assert "comm_collectives.part" not in optimizer.state_dict()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_the_optimizer_takes_the_state_of_its_own_part_alone(pools: Pools, stage: int) -> None:
    for rank, found in enumerate(pools(2).run(load_states_of_ranks, stage)):
        begin = "optimizer.load_state_dict: state: got that of "
        assert found[0].startswith(f"{begin}rank 0; expected rank 1" if rank else ""), found
        assert bool(found[0]) == bool(rank)
        assert found[1].startswith(f"{begin}no sharded optimizer; expected rank {rank}")
        assert found[2].startswith(f"{begin}stage 9; expected stage {stage}")
        assert "handle.load_state_dict(state, optimizer)" in found[2]


def save_and_load_empty(folder: str, stage: int) -> None:
    model = nn.Linear(2, 2)
    model.empty = nn.Parameter(torch.zeros(0, 3))
    with register_sharded_hooks(model, stage) as handle:
        dcp.save(handle.state_dict(), checkpoint_id=folder)
        state = handle.state_dict()
        dcp.load(state, checkpoint_id=folder)
        handle.load_state_dict(state)
    plain = {"model": {"empty": torch.zeros(0, 3)}}
    dcp.load(plain, checkpoint_id=folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_without_elements_are_saved_and_loaded(pools: Pools, tmp_path: Path, stage: int) -> None:
    pools(2).run(save_and_load_empty, str(tmp_path), stage)


def save_and_load_divided_layers(folder: str, stage: int) -> None:
    rank = dist.get_rank()
    alone = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
    prefix = f"tensor{rank}."
    saved: list[dict[str, Any]] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2, bias=False))
        divided = register_model_parallel_hooks(model, None, {"0": "column", "2": "row"})
        assert divided is not None
        with divided, register_sharded_hooks(model, stage, group=alone) as handle:
            optimizer = torch.optim.Adam(handle.parameter_groups(), lr=0.1 + rank)
            handle.attach(optimizer)
            for refused in (handle.state_dict, lambda: handle.load_state_dict({})):
                with pytest.raises(
                    ArgumentError, match=r"prefix: got none .* register_model_parallel_hooks\(\) divides"
                ):
                    refused()
            if seed == 0:
                model(torch.ones(3, 4)).sum().backward()
                optimizer.step()
                dcp.save(handle.state_dict(optimizer, prefix), checkpoint_id=folder)
            else:
                optimizer.param_groups[0]["lr"] = 7.0
                state = handle.state_dict(optimizer, prefix)
                with pytest.raises(ArgumentError, match=r"got nothing for parameter 'other\.0\.weight'"):
                    handle.load_state_dict(state, optimizer, "other.")
                dcp.load(state, checkpoint_id=folder)
                handle.load_state_dict(state, optimizer, prefix)
                assert optimizer.param_groups[0]["lr"] == 0.1 + rank
            tensors = handle.full_state_dict()
            for tensor, kept in optimizer.state.items():
                tensors |= {"tensor": tensor.detach().clone(), **{name: one.clone() for name, one in kept.items()}}
            saved.append(tensors)
    assert len(saved[0]) > 6
    for name, one in saved[0].items():
        assert torch.equal(one, saved[1][name]), name
    dist.destroy_process_group(alone)


def test_ranks_with_other_tensors_under_the_same_names(pools: Pools, tmp_path: Path) -> None:
    for stage in (1, 3):
        pools(2).run(save_and_load_divided_layers, str(tmp_path / str(stage)), stage)
