"""Models that change after hooks were registered: they train as without hooks, or an error says what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import comm_orchestrator as dist
from comm_collectives.hooks import register_data_parallel_hooks, register_sharded_hooks
from comm_utils.errors import ArgumentError
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]

STEPS, CHANGED_AT = 4, 2


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def inputs_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def set_data(model: nn.Module) -> None:
    for one in model.parameters():
        one.data = one.data.clone() / 2


def convert_there_and_back(model: nn.Module) -> None:
    model.double().float()


def set_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach() / 2, model.parameters())


def average(model: nn.Module) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(2):
        averaged.update_parameters(model)
    averaged(torch.ones(2, 5)).sum().backward()


def replace(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def add(model: Any) -> None:
    model.append(nn.Linear(3, 3))


def assign(model: nn.Module) -> None:
    model.load_state_dict(make_model().state_dict(), assign=True)


def exchange(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        convert_there_and_back(model)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


WORK: dict[str, Callable[[Any], Any]] = {
    "parameter.data": set_data,
    "double and float": convert_there_and_back,
    "vector_to_parameters": set_vector,
    "load_state_dict": lambda model: model.load_state_dict(make_model().state_dict()),
    "parametrization": lambda model: parametrize.register_parametrization(model[0], "weight", Doubled()),
    "orthogonal": lambda model: parametrizations.orthogonal(model[2]),
    "prune": lambda model: prune.l1_unstructured(model[0], "weight", amount=0.3),
    "AveragedModel": average,
    "deepcopy": lambda model: copy.deepcopy(model)(torch.ones(2, 5)).sum().backward(),
}


def call_functionally(model: nn.Module) -> None:
    others = {name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()}
    torch.func.functional_call(model, others, torch.ones(2, 5))


NEW = "parameter '{}' was added or replaced after the hooks were registered"
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "assign": (assign, "load_state_dict: got assign=True, which replaces parameter"),
    "replace": (replace, "forward: " + NEW.format("0.weight")),
    "add": (add, "forward: " + NEW.format("3.weight")),
    "weight_norm": (
        lambda model: parametrizations.weight_norm(model[0]),
        "forward: " + NEW.format("0.parametrizations.weight.original0"),
    ),
    "exchange": (exchange, "forward: " + NEW.format("0.weight")),
    "functional_call": (
        call_functionally,
        "is no nn.Parameter, as within torch.func.functional_call()",
    ),
    "bfloat16": (lambda model: model.bfloat16(), "expected torch.float32"),
}


def plain_curve(change: Callable[[Any], Any]) -> list[float]:
    model, W, curve = make_model(), dist.get_world_size(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if step == CHANGED_AT:
            change(model)
        optimizer.zero_grad()
        loss = sum(model(inputs_of(step, rank)).square().mean() for rank in range(W)) / W
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


def hooked_curve(stage: int, change: Callable[[Any], Any]) -> list[float]:
    model, curve = make_model(), []
    handle: Any = register_sharded_hooks(model, stage) if stage else register_data_parallel_hooks(model)
    trained = handle.parameter_groups() if stage else model.parameters()
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    with handle:
        if stage:
            handle.attach(optimizer)
        for step in range(STEPS):
            if step == CHANGED_AT:
                with handle.full_parameters(writes=True) if stage == 3 else nullcontext():
                    change(model)
            optimizer.zero_grad()
            dtype = next(model.parameters()).dtype
            loss = model(inputs_of(step, dist.get_rank()).to(dtype)).float().square().mean()
            loss.backward()
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total, "avg")
            curve.append(total.item())
    return curve


def curves(stage: int) -> list[tuple[str, list[float], list[float]]]:
    return [(name, plain_curve(change), hooked_curve(stage, change)) for name, change in WORK.items()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_changed_models_train_as_without_hooks(pools: Pools, stage: int) -> None:
    for found in pools(2).run(curves, stage, timeout_s=120):
        for name, expected, got in found:
            assert got == pytest.approx(expected, rel=1e-4), name


def refusals(stage: int) -> list[tuple[str, str]]:
    found = []
    for name, (change, _) in REFUSED.items():
        with pytest.raises(ArgumentError) as caught:
            hooked_curve(stage, change)
        found.append((name, str(caught.value)))
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_hooks_would_miss_is_refused(pools: Pools, stage: int) -> None:
    for found in pools(2).run(refusals, stage, timeout_s=120):
        for name, text in found:
            if name == "exchange" and stage == 3:
                continue
            expected = "load_state_dict: got assign=True" if stage == 3 and name == "assign" else REFUSED[name][1]
            assert expected in text, (name, text)
            assert "remove() the hooks" in text, (name, text)


def renormalized() -> None:
    for module in (nn.Embedding(4, 3, max_norm=1.0), nn.EmbeddingBag(4, 3, max_norm=1.0)):
        model = nn.Sequential(module, nn.Linear(3, 2))
        with pytest.raises(ArgumentError, match=r"register_data_parallel_hooks: model: module '0' has max_norm=1.0"):
            register_data_parallel_hooks(model)
        with pytest.raises(ArgumentError, match=r"register_sharded_hooks: model: module '0' has max_norm=1.0"):
            register_sharded_hooks(model, 1)
        # Rows that are not trained have the same norm wherever they are used.
        module.weight.requires_grad_(False)
        handle = register_data_parallel_hooks(model)
        assert handle is not None
        handle.remove()


def test_embeddings_that_change_in_a_forward_are_refused(pools: Pools) -> None:
    pools(2).run(renormalized)


def unusual_defaults() -> None:
    for register in (register_data_parallel_hooks, lambda model: register_sharded_hooks(model, 2)):
        refused = pytest.raises(ArgumentError, match=r"_hooks: got called within torch\.inference_mode")
        with torch.inference_mode(), refused:
            register(make_model())
    model = make_model()
    torch.set_default_device("meta")
    try:
        handle: Any = register_sharded_hooks(model, 3)
    finally:
        torch.set_default_device(None)
    with handle:
        model(inputs_of(0, dist.get_rank())).sum().backward()


def test_registration_within_inference_mode_or_with_another_default_device(pools: Pools) -> None:
    pools(2).run(unusual_defaults)


def replaced_data(stage: int) -> None:
    model, half = make_model(), [one.detach() / 2 for one in make_model().parameters()]
    handle: Any = register_sharded_hooks(model, stage)
    with handle:
        optimizer = torch.optim.SGD(handle.parameter_groups(), lr=0.1)
        set_data(model)
        assert all(torch.equal(one, other) for one, other in zip(handle.full_state_dict().values(), half, strict=True))
        model(inputs_of(0, dist.get_rank())).sum().backward()
        optimizer.step()
        set_data(model)
        with pytest.raises(ArgumentError, match=r"gather: the data of parameter '2.bias' was replaced while results"):
            handle.gather()
        model[2].bias.data = torch.ones(4)
        with pytest.raises(ArgumentError, match=r"forward: parameter '2.bias' has shape \(4,\); expected \(3,\)"):
            model(inputs_of(0, 0))


@pytest.mark.parametrize("stage", [1, 2])
def test_replaced_data_is_kept_or_refused(pools: Pools, stage: int) -> None:
    pools(2).run(replaced_data, stage)


def copies() -> None:
    model = make_model()
    handle = register_data_parallel_hooks(model)
    assert handle is not None
    with handle:
        other = copy.deepcopy(model)
        other.load_state_dict(model.state_dict(), assign=True)
        add(other)
        other(inputs_of(0, 0)).sum().backward()
    assign(model)


def test_copies_of_a_model_may_change(pools: Pools) -> None:
    pools(2).run(copies)
