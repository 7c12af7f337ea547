"""Calls of the handle of sharded training, wrong uses, and what is left after the hooks are removed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import comm_orchestrator as dist
from comm_collectives.hooks import (
    GradientReduction,
    Sharded,
    partition,
    partition_range,
    register_model_parallel_hooks,
    register_sharded_hooks,
    unpartition,
)
from comm_utils.errors import ArgumentError, CollectiveMismatchError
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def registered(model: nn.Module, stage: int, **options: Any) -> Sharded:
    handle = register_sharded_hooks(model, stage, **options)
    assert handle is not None
    return handle


def sgd(handle: Sharded) -> torch.optim.Optimizer:
    return torch.optim.SGD(handle.parameter_groups(), lr=0.1)


def data() -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))


# --- wrong uses


def refused_removal(handle: Sharded) -> str:
    with pytest.raises(ArgumentError) as caught:
        handle.remove()
    return str(caught.value)


def refusals(stage: int) -> list[str]:
    found: list[str] = []
    rank = dist.get_rank()
    model = make_model()

    def expect(kind: type[Exception], body: Callable[[], Any]) -> None:
        with pytest.raises(kind) as caught:
            body()
        found.append(str(caught.value))

    expect(ArgumentError, lambda: register_sharded_hooks(model, 4))
    expect(ArgumentError, lambda: register_sharded_hooks(nn.Tanh(), stage))
    expect(CollectiveMismatchError, lambda: register_sharded_hooks(nn.Linear(3, 4 + rank), stage))
    expect(CollectiveMismatchError, lambda: register_sharded_hooks(model, stage, bucket_size_bytes=100 + rank))
    expect(ArgumentError, lambda: register_sharded_hooks(model, stage, bucket_size_bytes=rank))
    of_model = torch.optim.SGD(model.parameters(), lr=0.1)
    with registered(model, stage) as handle:
        for groups in ([model[0].weight], [model[2].weight])[rank], None:
            different = torch.optim.SGD(handle.parameter_groups(groups), lr=0.1 + rank)
            expect(CollectiveMismatchError, lambda different=different: handle.attach(different))
        optimizer = sgd(handle)
        handle.attach(optimizer)
        expect(ArgumentError, lambda: register_sharded_hooks(model, stage))
        expect(ArgumentError, lambda: handle.attach(of_model))
        expect(ArgumentError, lambda: of_model.step())
        expect(ArgumentError, lambda: handle.attach(torch.optim.SGD([torch.ones(3)], lr=0.1)))
        expect(ArgumentError, lambda: optimizer.step())
        expect(ArgumentError, lambda: optimizer.step(lambda: model(data()).sum()))
        expect(ArgumentError, lambda: optimizer.step(closure=lambda: model(data()).sum()))
        expect(ArgumentError, lambda: handle.parameter_groups())
        with handle.no_sync():
            model(data()).sum().backward()
        expect(ArgumentError, lambda: optimizer.step())
        expect(ArgumentError, lambda: handle.clip_grad_norm(1.0))
        expect(ArgumentError, lambda: handle.load_state_dict(handle.state_dict(), optimizer))
        expect(ArgumentError, lambda: handle.remove())
        within: list[str] = []
        outputs = model(data())
        outputs.register_hook(lambda gradient: within.append(refused_removal(handle)))
        outputs.sum().backward()
        found += within
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        optimizer.zero_grad()
        # An infinity in one part only: without a refusal, one rank makes the step and waits for the other.
        scaler.scale(model(data()).sum() * (math.inf if rank else 1.0)).backward()
        expect(ArgumentError, lambda: scaler.step(optimizer))
        optimizer.zero_grad()
        model(data()).sum().backward()
        optimizer.step()
        state = handle.state_dict(optimizer)
        state["optimizer"]["state"] = {"0.weight": {}}
        momentum = torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1, momentum=0.9)
        state["optimizer"]["param_groups"][0]["momentum"] = 0.9
        expect(ArgumentError, lambda: handle.load_state_dict(state, momentum))
    expect(ArgumentError, lambda: handle.gather())
    of_model.step()
    with registered(model, stage) as handle:
        expect(ArgumentError, lambda: handle.parameter_groups([torch.ones(3)]))
        weight = model[0].weight
        expect(ArgumentError, lambda: handle.parameter_groups([{"params": weight}, {"params": [weight]}]))
        adafactor = torch.optim.Adafactor(handle.parameter_groups())
        model(data()).sum().backward()
        adafactor.step()
        kept = next(iter(adafactor.state.values()))
        kept["rows"] = torch.ones(2, 2)  # as optimizers keep that treat a tensor as a matrix
        expect(ArgumentError, lambda: handle.state_dict(adafactor))
    return found


EXPECTED = [
    "register_sharded_hooks: stage: got 4",
    "register_sharded_hooks: model: got one without parameters that require gradients",
    "register_sharded_hooks: model: parameter 0 is 'weight' of shape (5, 3) and float32 on rank 1",
    "register_sharded_hooks: bucket_size_bytes: got 101 on rank 1",
    "register_sharded_hooks: ",
    "attach: group 0: parameters: got ['2.weight'] on rank 1 and ['0.weight'] on rank 0; expected the same",
    "attach: group 0: lr: got 1.1 on rank 1 and 0.1 on rank 0; expected the same on all ranks",
    "register_sharded_hooks: model: parameter '0.weight' has the hooks of register_sharded_hooks()",
    "attach: optimizer: got one with parameter '0.weight' of the model",
    "optimizer.step: optimizer: got one with parameter '0.weight' of the model",
    "attach: optimizer: got one with a tensor of shape (3,) that is no part of this model",
    "optimizer.step: got called without gradients",
    "optimizer.step: closure: got one; closures are not supported by sharded hooks; call backward() before step()",
    "optimizer.step: closure: got one; closures are not supported by sharded hooks; call backward() before step()",
    "parameter_groups: got called after attach()",
    "optimizer.step: got called while gradients of no_sync() wait",
    "clip_grad_norm: got called while gradients of no_sync() wait",
    "load_state_dict: state: got one without 'optimizer'",
    "remove: got called while gradients of no_sync() wait",
    "remove: got called within a backward",
    "optimizer.step: got called by a torch.amp.GradScaler",
    "load_state_dict: state: got nothing for parameter",
    "gather: got called after remove()",
    "parameter_groups: groups: group 0 has a tensor of shape (3,)",
    "parameter_groups: groups: parameter '0.weight' is in group 0 and in group 1",
    "state_dict: optimizer: Adafactor keeps 'rows' of shape (2, 2)",
]


@pytest.mark.parametrize("stage", [1, 3])
def test_wrong_uses_name_the_culprit(pools: Pools, stage: int) -> None:
    for rank, found in enumerate(pools(2).run(refusals, stage)):
        for text, begin in zip(found, EXPECTED, strict=True):
            assert text.startswith(begin), text
        assert ("rank 0 refused its arguments" in found[4]) == (rank == 1)


def freed() -> list[str]:
    found: list[str] = []
    model = make_model()
    shapes = [one.shape for one in model.parameters()]
    with registered(model, 3) as handle:
        assert [one.shape for one in model.parameters()] == shapes
        for body in (model.state_dict, lambda: model.load_state_dict({})):
            with pytest.raises(ArgumentError) as caught:
                body()
            found.append(str(caught.value))
        with handle.full_parameters(writes=True):
            model.load_state_dict(make_model(seed=1).state_dict())
        with handle.full_parameters():
            model[0].weight.data.fill_(9.0)
        whole, expected = handle.full_state_dict(), make_model(seed=1).state_dict()
        assert all(torch.equal(whole[name], expected[name]) for name in expected)
        compiled = torch.compile(make_model())
        with pytest.raises(ArgumentError) as refused:
            register_sharded_hooks(compiled, 3)
        found.append(str(refused.value))
    assert all(torch.equal(one, expected[name]) for name, one in model.named_parameters())
    return found


def test_freed_parameters_are_not_mistaken_for_values(pools: Pools) -> None:
    for found in pools(2).run(freed):
        assert "use handle.full_state_dict()" in found[0]
        assert "within handle.full_parameters(writes=True)" in found[1]
        assert "compiled by torch.compile" in found[2]


# --- gradients


def one_step(stage: int, reduction: GradientReduction | None, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    model = make_model().to(dtype)
    model[2].double()
    with registered(model, stage, reduction=reduction, bucket_size_bytes=1) as handle:
        optimizer = sgd(handle)
        handle.attach(optimizer)
        inner = model[1](model[0](data().to(dtype)))
        model[2](inner.double()).square().sum().backward()
        optimizer.step()
    return [one.detach().double() for one in model.parameters()]


def reductions() -> None:
    W = dist.get_world_size()
    plain = make_model()
    expected: dict[str, list[torch.Tensor]] = {}
    for op, divisor in (("sum", 1), ("avg", W)):
        for one in plain.parameters():
            one.grad = None
        for rank in range(W):
            drawn = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
            (plain(drawn).square().sum() / divisor).backward()
        expected[op] = [(one - 0.1 * one.grad).detach().double() for one in plain.parameters()]
    for stage in (1, 2, 3):
        for reduction, tolerance in (
            (GradientReduction(op="sum"), 1e-5),
            (GradientReduction(prescale=True), 1e-5),
            (GradientReduction(predivide_factor=2.0), 1e-5),
            (GradientReduction(compression="int8"), 0.05),
            (GradientReduction(compression="fp16"), 1e-2),
        ):
            got = one_step(stage, reduction)
            for one, other in zip(got, expected[reduction.op], strict=True):
                torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        for one, other in zip(one_step(stage, None, torch.bfloat16), expected["avg"], strict=True):
            torch.testing.assert_close(one, other, rtol=0.1, atol=0.1)


def test_reductions_and_mixed_dtypes(pools: Pools) -> None:
    pools(2).run(reductions)
    pools(3).run(reductions)


def norms() -> None:
    model, plain = make_model(), make_model()
    total = sum(
        plain(torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))).sum() / dist.get_world_size()
        for rank in range(dist.get_world_size())
    )
    total.backward()
    with registered(model, 2) as handle:
        sgd(handle)
        model(data()).sum().backward()
        for order in (2.0, 1.0, 3.0, math.inf):
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9, order)
            torch.testing.assert_close(handle.clip_grad_norm(1e9, order), expected)
        with pytest.raises(ArgumentError, match="norm_type"):
            handle.clip_grad_norm(1.0, 0.0)
        handle.clip_grad_norm(0.5)
        torch.testing.assert_close(handle.clip_grad_norm(1e9), torch.tensor(0.5), rtol=1e-4, atol=0)
    model = make_model().double()
    with registered(model, 2) as handle:
        # One rank alone has elements of it.
        torch.optim.SGD(handle.parameter_groups([model[2].bias]), lr=0.1)
        model(data().double()).sum().backward()
        torch.testing.assert_close(handle.clip_grad_norm(1e9), torch.tensor(4 * 3**0.5, dtype=torch.float64))


def norm_of_not_a_number() -> None:
    for of_rank in range(2):
        model = nn.Linear(4, 1, bias=False)
        with registered(model, 2) as handle:
            optimizer = sgd(handle)
            model(torch.ones(1, 4)).sum().backward()
            if dist.get_rank() == of_rank:
                optimizer.param_groups[0]["params"][0].grad[0] = math.nan
            assert handle.clip_grad_norm(1.0, math.inf).isnan()


def test_norms_of_not_a_number(pools: Pools) -> None:
    pools(2).run(norm_of_not_a_number)


class HasEmptyParameters(nn.Module):
    """A model whose only parameters of two dtypes have no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(4))
        self.empty = nn.Parameter(torch.empty(0, dtype=torch.float64))
        self.other = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))

    def forward(self) -> torch.Tensor:
        return self.used.sum() + self.empty.sum() + self.other.sum()


def without_elements(stage: int) -> None:
    model = HasEmptyParameters()
    with registered(model, stage) as handle:
        optimizer = sgd(handle)
        handle.attach(optimizer)
        for _ in range(2):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(model.used, torch.full((4,), 0.8))


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_without_elements_in_dtypes_of_their_own(pools: Pools, stage: int) -> None:
    pools(2).run(without_elements, stage)


def norm_of_encoded_gradients(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(10)))
    before = [one.detach().clone() for one in model.parameters()]
    with registered(model, stage, reduction=GradientReduction(compression="onebit")) as handle:
        optimizer = torch.optim.SGD(handle.parameter_groups(), lr=1.0)
        handle.attach(optimizer)
        model(torch.ones(2, 1)).sum().backward()
        norm = handle.clip_grad_norm(1e9)
        optimizer.step()
    gradients = [(old - one.detach()).flatten() for old, one in zip(before, model.parameters(), strict=True)]
    torch.testing.assert_close(norm, torch.cat(gradients).norm())


def test_norms_leave_out_what_lies_between_parameters(pools: Pools) -> None:
    for stage in (1, 2, 3):
        pools(2).run(norm_of_encoded_gradients, stage)


def group_added_later(stage: int) -> None:
    model, plain = make_model(), make_model()
    with registered(model, stage, bucket_size_bytes=1) as handle:
        groups = handle.parameter_groups([{"params": one.parameters()} for one in (model[2], model[0])])
        optimizers = [
            torch.optim.SGD(groups[:1], lr=0.1),
            torch.optim.SGD(plain[2].parameters(), lr=0.1),
        ]
        handle.attach(optimizers[0])
        for step in range(4):
            if step == 2:
                optimizers[0].add_param_group(groups[1])
                optimizers[1].add_param_group({"params": plain[0].parameters()})
            for one, optimizer in zip((model, plain), optimizers, strict=True):
                one(torch.arange(10.0).view(2, 5)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            plain.zero_grad()
            if step < 2:  # of the group that no optimizer has
                for one in groups[1]["params"]:
                    one.grad = None
        optimizers[0].add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
        with pytest.raises(ArgumentError, match=r"optimizer.step: optimizer: got one with a tensor of shape \(3,\)"):
            optimizers[0].step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_groups_that_an_optimizer_gets_later(pools: Pools) -> None:
    for stage in (1, 2, 3):
        pools(2).run(group_added_later, stage)


def norm_of_divided_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    divided = register_model_parallel_hooks(model, None, {"0": "column", "2": "row"})
    assert divided is not None
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with divided, registered(model, 1, group=alone) as handle:
        optimizer = sgd(handle)
        handle.attach(optimizer)
        model(torch.ones(3, 4)).sum().backward()
        with pytest.raises(ArgumentError, match=r"clip_grad_norm: got a model whose layers register_model_parallel"):
            handle.clip_grad_norm(1.0)
        with pytest.raises(ArgumentError, match=r"clip_grad_norm: got a model with the hooks of register_sharded"):
            divided.clip_grad_norm(1.0)
        optimizer.step()
    dist.destroy_process_group(alone)


def test_no_norm_of_layers_that_other_ranks_divide(pools: Pools) -> None:
    pools(2).run(norm_of_divided_layers)


def test_norms_are_those_of_whole_gradients(pools: Pools) -> None:
    pools(3).run(norms)


#: As a program has them that imported them before.
CLIPPING: list[Any] = [clip_grad_norm_, clip_grad_value_, nn.utils.clip_grads_with_norm_, nn.utils.get_total_norm]


def clipped_by_torch(stage: int) -> list[str]:
    found, model, other = [], make_model(), make_model()
    before = [function.__closure__[0].cell_contents for function in CLIPPING]
    with registered(model, stage) as handle, registered(make_model(), 1) as another:
        optimizer = sgd(handle)
        handle.attach(optimizer)
        model(data()).sum().backward()
        gradients = [one.grad.clone() for group in optimizer.param_groups for one in group["params"]]
        for parameters in (model.parameters(), model[2].bias, optimizer.param_groups[0]["params"]):
            with pytest.raises(ArgumentError) as caught:
                clip_grad_norm_(parameters, 0.001)
            found.append(str(caught.value))
        for group in optimizer.param_groups:
            for one, gradient in zip(group["params"], gradients, strict=True):
                assert torch.equal(one.grad, gradient)
        # Other models, values, and norms that the program knows are not concerned.
        other(data()).sum().backward()
        clip_grad_norm_(other.parameters(), 0.001)
        torch.testing.assert_close(clip_grad_norm_(other.parameters(), 1.0), torch.tensor(0.001), rtol=0.01, atol=0)
        tensors = optimizer.param_groups[0]["params"]
        for clip in (
            lambda: clip_grad_value_(model.parameters(), 1e-4),
            lambda: clip_grad_value_(parameters=model[2].bias, clip_value=1e-4),
            lambda: nn.utils.clip_grads_with_norm_(model.parameters(), 1e-4, torch.tensor(1.0)),
            lambda: nn.utils.get_total_norm([one.grad for one in tensors]),
        ):
            with pytest.raises(ArgumentError) as caught:
                clip()
            found.append(str(caught.value))
        assert clip_grad_value_(other.parameters(), clip_value=1e-4) is None
        assert nn.utils.get_total_norm(tensors=[one.grad for one in other.parameters()]) < 1.0
        nn.utils.clip_grads_with_norm_(tensors, 1.0, torch.tensor(1.0))
        clip_grad_value_(tensors, 1e-4)
        assert handle.clip_grad_norm(1.0) < 1e-2
        another.remove()
        with pytest.raises(ArgumentError):
            clip_grad_norm_(model.parameters(), 1.0)
    assert [function.__closure__[0].cell_contents for function in CLIPPING] == before
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_norms_by_torch_are_refused(pools: Pools, stage: int) -> None:
    for model, bias, tensors, values, value, scaled, total in pools(2).run(clipped_by_torch, stage):
        assert values.startswith("torch.nn.utils.clip_grad_value_: got parameter '")
        assert "call it on the tensors in optimizer.param_groups, on all ranks" in values
        assert value.startswith("torch.nn.utils.clip_grad_value_: got parameter '2.bias' of a model")
        assert scaled.startswith("torch.nn.utils.clip_grads_with_norm_: got parameter '")
        assert total.startswith("torch.nn.utils.get_total_norm: got the gradient of the tensor of handle.parameter_")
        assert "handle.clip_grad_norm(math.inf)" in total
        assert model.startswith("torch.nn.utils.clip_grad_norm_: got parameter '")
        assert bias.startswith("torch.nn.utils.clip_grad_norm_: got parameter '2.bias' of a model with the hooks of")
        assert tensors.startswith("torch.nn.utils.clip_grad_norm_: got the tensor of handle.parameter_groups() for '")
        assert "call handle.clip_grad_norm(max_norm) on all ranks" in model


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


def after_failures(stage: int) -> None:
    model, plain = make_model(), make_model()
    with registered(model, stage, bucket_size_bytes=1) as handle:
        optimizer = sgd(handle)
        handle.attach(optimizer)
        with pytest.raises(ZeroDivisionError):
            model[2](Fails.apply(model[1](model[0](data())))).sum().backward()
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 3))
        with torch.no_grad():
            model(data())
        # Gradients that stay in the graph reduce nothing.
        x = data().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
        assert gradient.abs().sum() > 0
        optimizer.zero_grad()
        first, second = model(data()), model(2 * data())
        first.sum().backward()
        second.sum().backward()
        optimizer.step()
    for scale in (1, 2):
        for rank in range(dist.get_world_size()):
            drawn = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
            (plain(scale * drawn).sum() / dist.get_world_size()).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other - 0.1 * other.grad)


def test_passes_that_fail_or_bring_no_gradients(pools: Pools) -> None:
    for stage in (1, 2, 3):
        pools(2).run(after_failures, stage)


def dropped(stage: int) -> None:
    model = make_model()
    before, plain = copy.deepcopy(model), copy.deepcopy(model)
    with registered(model, stage) as handle:
        groups = handle.parameter_groups([{"params": model[0].parameters()}, {"params": [model[2].weight]}])
        optimizers = [torch.optim.SGD([group], lr=0.1) for group in groups]  # nothing updates model[2].bias
        for one in optimizers:
            handle.attach(one)
        with handle.no_sync():
            model(100 * data()).sum().backward()
        for one in optimizers:
            one.zero_grad()
        with pytest.raises(ArgumentError, match="without gradients"):
            optimizers[0].step()
        with handle.no_sync():
            model(data()).sum().backward()
        optimizers[0].zero_grad(set_to_none=False)  # the gradients of the other optimizer stay
        model(data()).sum().backward()
        for one in optimizers:
            one.step()
    assert all("zero_grad" not in vars(one) for one in optimizers)
    for rank in range(dist.get_world_size()):
        drawn = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
        (plain(drawn).sum() / dist.get_world_size()).backward()
    for (name, one), old, other in zip(model.named_parameters(), before.parameters(), plain.parameters(), strict=True):
        rate = {"2.weight": 0.2, "2.bias": 0.0}.get(name, 0.1)
        torch.testing.assert_close(one, old - rate * other.grad)


def test_zero_grad_drops_gradients_that_were_not_reduced(pools: Pools) -> None:
    for stage in (1, 2, 3):
        pools(2).run(dropped, stage)


def failure_after_others(stage: int, synchronizes: bool) -> None:
    model, plain = make_model(), make_model()
    with registered(model, stage, bucket_size_bytes=1) as handle:
        optimizer = sgd(handle)
        handle.attach(optimizer)
        with handle.no_sync():
            model(data()).sum().backward()
        with pytest.raises(ZeroDivisionError), nullcontext() if synchronizes else handle.no_sync():
            # It brings gradients of the last layer only.
            model[2](Fails.apply(model[1](model[0](data())))).sum().backward()
        with pytest.raises(ArgumentError, match="wait for their reduction"):
            optimizer.step()
        model(2 * data()).sum().backward()
        optimizer.step()
    for rank in range(dist.get_world_size()):
        drawn = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
        for scale in (1, 2):
            (plain(scale * drawn).sum() / dist.get_world_size()).backward()
        # As without hooks, what came before the error was added.
        (plain[2](plain[1](plain[0](drawn)).detach()).sum() / dist.get_world_size()).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other - 0.1 * other.grad)


def test_a_backward_that_fails_loses_no_earlier_gradients(pools: Pools) -> None:
    for stage in (1, 2, 3):
        for synchronizes in (False, True):
            pools(2).run(failure_after_others, stage, synchronizes)


# --- what a backward reads, and what it refuses


class Scale(nn.Module):
    """Multiplies by a vector before and after what it calls; its backward needs the vector twice."""

    def __init__(self, called: nn.Module | None = None, is_trained: bool = True, is_within: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5), requires_grad=is_trained)
        self.called = called if is_within else None
        self.also_called = [called]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The gradient of the vector is complete before the backward reads the other one.
        x = x * self.scale.detach()
        if self.also_called[0] is not None:
            x = self.also_called[0](x)
        return x * self.scale


class CallsAnother(nn.Sequential):
    """The last module calls one that is not within it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 5), Scale(nn.Linear(5, 5), False, is_within=False))
        self.another = self[1].also_called[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x))


READERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Sequential(nn.Linear(5, 5), Scale(), nn.Linear(5, 5)),
    lambda: nn.Sequential(nn.Linear(5, 5), Scale(nn.Linear(5, 5)), nn.Linear(5, 5)),
    lambda: nn.Sequential(nn.Linear(5, 5), Scale(nn.Linear(5, 5), is_trained=False)),
    CallsAnother,
]


def read_in_backward() -> None:
    for make in READERS:
        for size_bytes in (1, 1 << 20):
            torch.manual_seed(0)
            model = make()
            plain = copy.deepcopy(model)
            trained = [one for one in plain.parameters() if one.requires_grad]
            with registered(model, 3, bucket_size_bytes=size_bytes) as handle:
                optimizers = [sgd(handle), torch.optim.SGD(trained, lr=0.1)]
                handle.attach(optimizers[0])
                for _ in range(2):  # the second pass gathers in the background
                    for one, optimizer in zip((model, plain), optimizers, strict=True):
                        optimizer.zero_grad()
                        one(torch.arange(10.0).view(2, 5)).square().mean().backward()
                        optimizer.step()
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one, other)


def test_backwards_find_the_values_that_they_read(pools: Pools) -> None:
    pools(2).run(read_in_backward)


class Slotted:
    __slots__ = ("_fields", "itself")

    def __init__(self, x: torch.Tensor) -> None:
        self._fields, self.itself = {"x": [x]}, self


WRAPPERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "attribute": (lambda x: SimpleNamespace(inner=SimpleNamespace(x=x)), lambda value: value.inner.x),
    "slots": (Slotted, lambda value: value._fields["x"][0]),
    "function": (lambda x: lambda: x, lambda value: value()),
}


class Wrapped(nn.Module):
    """Returns its result in an object; the backward of the product reads the parameter."""

    def __init__(self, wrapper: str) -> None:
        super().__init__()
        self.weight, self.wrapper = nn.Parameter(torch.randn(5, 5)), wrapper

    def forward(self, x: Any) -> Any:
        wrap, unwrap = WRAPPERS[self.wrapper]
        return wrap(torch.tanh((x if isinstance(x, torch.Tensor) else unwrap(x)) @ self.weight))


def wrapped_outputs() -> None:
    for wrapper, (_, unwrap) in WRAPPERS.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(Wrapped(wrapper) for _ in range(3)))
        plain = copy.deepcopy(model)
        with registered(model, 3, bucket_size_bytes=1) as handle:
            optimizers = [sgd(handle), torch.optim.SGD(plain.parameters(), lr=0.1)]
            handle.attach(optimizers[0])
            for _ in range(2):
                for one, optimizer in zip((model, plain), optimizers, strict=True):
                    optimizer.zero_grad()
                    unwrap(one(torch.arange(10.0).view(2, 5))).square().mean().backward()
                    optimizer.step()
            assert handle.memory().parameter_bytes < sum(4 * one.numel() for one in plain.parameters())
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other), wrapper


def test_outputs_of_any_kind(pools: Pools) -> None:
    pools(2).run(wrapped_outputs)


class Remembers(nn.Linear):
    """Returns nothing that a backward comes through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.result = [super().forward(x)]
        return x.detach()


def unnoticed_backward() -> str:
    model = nn.Sequential(Remembers(5, 5))
    with registered(model, 3) as handle:
        model(data())
        with pytest.raises(ArgumentError) as caught:
            model[0].result[0].square().sum().backward()
        assert all(one.grad is None for group in handle.parameter_groups() for one in group["params"])
    return str(caught.value)


def test_backwards_that_bypass_the_output_are_refused(pools: Pools) -> None:
    for message in pools(2).run(unnoticed_backward):
        assert message.startswith("backward: the gradient of parameter '0.")
        assert "return such tensors" in message


def second_backwards(stage: int) -> str:
    model = make_model()
    with registered(model, stage) as handle:
        optimizer = sgd(handle)
        handle.attach(optimizer)
        with pytest.raises(ArgumentError, match="create_graph=True") as caught:
            model(data()).square().sum().backward(create_graph=True)
        if stage < 3:  # as for a penalty on the gradient of the input
            x = data().requires_grad_()
            (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            gradient.square().sum().backward()
        else:
            model(data()).sum().backward()
        optimizer.step()
    return str(caught.value)


def test_gradients_of_gradients(pools: Pools) -> None:
    for stage in (1, 2, 3):
        assert len(set(pools(2).run(second_backwards, stage))) == 1


def backwards_of_older_values(stage: int) -> None:
    model = make_model()
    with registered(model, stage) as handle:
        optimizer = sgd(handle)
        handle.attach(optimizer)
        losses = [model(data()).square().sum() for _ in range(3)]
        losses[0].backward()
        losses[1].backward()  # nothing was written in between
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[2].backward()
        optimizer.zero_grad()
        handle.load_state_dict(handle.state_dict())
        loss = model(data()).square().sum()
        handle.load_state_dict(handle.state_dict())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_backwards_after_a_step_are_refused_as_without_hooks(pools: Pools, stage: int) -> None:
    pools(2).run(backwards_of_older_values, stage)


def ends_with_an_error(stage: int) -> None:
    from torch._dynamo import compiled_autograd

    model = make_model()
    with registered(model, stage) as handle:
        optimizer = sgd(handle)
        handle.attach(optimizer)
        # An error at the beginning, before there is an end to wait for.
        compiled_autograd.compiled_autograd_enabled = True
        try:
            with pytest.raises(ArgumentError, match="compiled autograd"):
                model(data()).sum().backward()
        finally:
            compiled_autograd.compiled_autograd_enabled = False
        model(data()).sum().backward()
        expected = [one.grad.clone() for group in optimizer.param_groups for one in group["params"]]
        # An error at the end: gradients that do not add up.
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad = None
                one.grad = torch.zeros_like(one)
                one.grad.resize_(one.numel() + 1)
        with pytest.raises(RuntimeError):
            model(data()).sum().backward()
        optimizer.zero_grad()
        model(data()).sum().backward()
        for one, other in zip(
            (one for group in optimizer.param_groups for one in group["params"]), expected, strict=True
        ):
            assert torch.equal(one.grad, other)
        optimizer.step()


def test_errors_at_both_ends_of_a_backward(pools: Pools) -> None:
    for stage in (1, 2, 3):
        pools(2).run(ends_with_an_error, stage)


class Branch(nn.Module):
    """Uses one of its parameters on the first rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(5, 5), nn.Parameter(torch.full((5,), 2.0))

    def forward(self, x: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        x = self.linear(x).tanh()
        return x * self.scale if (dist.get_rank() if rank is None else rank) == 0 else 2 * x


def branches(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), *(Branch() for _ in range(5)))
    plain, W = copy.deepcopy(model), dist.get_world_size()
    with registered(model, stage, bucket_size_bytes=150) as handle:
        optimizer = sgd(handle)
        handle.attach(optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            model(data()).square().sum().backward()
            optimizer.step()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for rank in range(W):
            x = plain[0](torch.randn(4, 5, generator=torch.Generator().manual_seed(rank)))
            for block in plain[1:]:
                x = block(x, rank)
            (x.square().sum() / W).backward()
        optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_ranks_use_different_parameters(pools: Pools) -> None:
    for stage in (1, 2, 3):
        pools(2).run(branches, stage)


def changes(stage: int) -> list[str]:
    found = []
    model = make_model()
    model[0].bias.requires_grad_(False)
    with registered(model, stage) as handle:
        sgd(handle)
        model[0].bias.requires_grad_(True)
        with torch.no_grad():
            model(data())
        for body in (model, lambda x: model[2](model[1](model[0](x))).sum().backward()):
            with pytest.raises(ArgumentError) as caught:
                body(data())
            found.append(str(caught.value))
        model[0].bias.requires_grad_(False)
        model.requires_grad_(False)
        model(data().requires_grad_()).sum().backward()  # gradients of the input alone
        model[0].weight.requires_grad_(True)
        with pytest.raises(ArgumentError) as caught:
            model(data()).sum().backward()
        found.append(str(caught.value))
        model.requires_grad_(True)
        model[0].bias.requires_grad_(False)
        model(data()).sum().backward()
    return found


def test_parameters_that_are_frozen_or_unfrozen_later(pools: Pools) -> None:
    for stage in (1, 2, 3):
        for unfrozen, within, frozen in pools(2).run(changes, stage):
            assert unfrozen.startswith("forward: parameter '0.bias' requires a gradient")
            assert within.startswith("backward: parameter '0.bias' requires a gradient")
            assert frozen.startswith("backward: parameter '2.weight' no longer requires a gradient")


def conversions(stage: int) -> None:
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    with registered(model, stage) as handle:
        handle.attach(sgd(handle))
        for convert in (model.double, lambda: model.to(torch.bfloat16)):
            if stage == 3:
                with pytest.raises(ArgumentError, match=r"got parameter '0.weight' .* remove\(\) the hooks"):
                    convert()
                name = r"full_parameters: parameter '0.weight' is torch"
                with pytest.raises(ArgumentError, match=name), handle.full_parameters():
                    convert()
                model(data()).sum().backward()
                continue
            convert()
            inputs = data().to(model[0].weight.dtype)
            name = r"forward: parameter '\d\.(weight|bias)' is torch.(float64|bfloat16) on cpu; expected torch.float32"
            for enabled in (True, False):
                with torch.set_grad_enabled(enabled), pytest.raises(ArgumentError, match=name):
                    model(inputs)
    for one, value in zip(model.parameters(), before.values(), strict=True):
        assert one.dtype == value.dtype


def test_parameters_that_are_converted_later(pools: Pools) -> None:
    for stage in (1, 2, 3):
        pools(2).run(conversions, stage)


def steps_that_nothing_gathers(stage: int) -> None:
    model, plain = make_model(), make_model()
    with registered(model, stage) as handle:
        optimizer = torch.optim.SGD(handle.parameter_groups(), lr=0.1, momentum=0.9)
        handle.state_dict(optimizer)  # makes the optimizer's state, which changes nothing
        model(data()).sum().backward()
        optimizer.step()
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled), pytest.raises(ArgumentError) as caught:
                model(data())
            assert str(caught.value).startswith(
                "optimizer.step: its results were not gathered; call handle.attach(optimizer) once, or handle.gather()"
            )
        handle.gather()
        model(data())
        handle.attach(optimizer)
        optimizer.zero_grad()
        model(data()).sum().backward()
        optimizer.step()
        model(data())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            drawn = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
            (plain(drawn).sum() / dist.get_world_size()).backward()
        optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_steps_that_nothing_gathers_are_noticed(pools: Pools) -> None:
    for stage in (1, 2):
        pools(2).run(steps_that_nothing_gathers, stage)


# --- parts of tensors


def parts() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    for shape in ((), (1,), (7,), (3, 5), (4, 0), (8, W)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            whole = (torch.arange(math.prod(shape)).view(shape) % 5).to(dtype)
            part = partition(whole)
            assert part.shape == (-(-whole.numel() // W),)
            begin, end = partition_range(whole.numel(), rank, W)
            assert torch.equal(part[: end - begin], whole.flatten()[begin:end])
            assert torch.equal(unpartition(part, shape), whole)
    assert torch.equal(unpartition(partition(torch.ones(3, 4).t()), (4, 3)), torch.ones(4, 3))
    with pytest.raises(ArgumentError, match=r"unpartition: part: got"):
        unpartition(torch.ones(5), (100,))
    with pytest.raises(ArgumentError, match="partition_range: rank"):
        partition_range(3, 4, 2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parts_of_tensors_that_do_not_divide(pools: Pools, world_size: int) -> None:
    pools(world_size).run(parts)


# --- groups, and what is left


def in_a_group() -> list[list[float]]:
    group = dist.new_group([0, 2])
    model = make_model(seed=dist.get_rank())
    handle = register_sharded_hooks(model, 3, group)
    if dist.get_rank() == 1:
        assert handle is None
        return []
    assert handle is not None
    with handle:
        optimizer = sgd(handle)
        handle.attach(optimizer)
        model(data()).sum().backward()
        optimizer.step()
    return [one.flatten().tolist() for one in model.parameters()]


def test_other_groups(pools: Pools) -> None:
    first, outside, last = pools(3).run(in_a_group)
    assert outside == []
    assert first == last


def traces(stage: int) -> None:
    model = make_model()
    kinds = [type(module._parameters) for module in model.modules()]
    with registered(model, stage) as handle:
        sgd(handle)
        model(data()).sum().backward()
    for module, kind in zip(model.modules(), kinds, strict=True):
        assert type(module._parameters) is kind
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._state_dict_pre_hooks
        assert not module._load_state_dict_pre_hooks
        assert not module._forward_hooks_always_called
    for one in model.parameters():
        assert not one._post_accumulate_grad_hooks
        assert one.grad is None
        assert one.untyped_storage().nbytes() == one.nbytes
    model(data()).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(one.grad is not None for one in model.parameters())


def test_removal_leaves_an_ordinary_model(pools: Pools) -> None:
    for stage in (1, 2, 3):
        pools(2).run(traces, stage)


# --- compiled models, and worlds that end


def compiled_curve(stage: int, compile_first: bool) -> list[list[float]]:
    results = []
    for compiles in (False, True):
        model = make_model()
        called: Any = model
        if compiles and compile_first:
            called = torch.compile(model, backend="aot_eager")
        with registered(called, stage, bucket_size_bytes=1) as handle:
            optimizer = sgd(handle)
            handle.attach(optimizer)
            if compiles and not compile_first:
                called = torch.compile(model, backend="aot_eager")
            losses = []
            for _ in range(3):
                optimizer.zero_grad()
                loss = called(data()).square().sum()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    assert results[0][0] > results[0][2]
    return results


def compiled_in_stage_3() -> str:
    model = make_model()
    with registered(model, 3), pytest.raises(Exception, match="register_sharded_hooks") as caught:
        torch.compile(model, backend="aot_eager")(data())
    return str(caught.value)


@pytest.mark.slow
def test_compiled_models(pools: Pools) -> None:
    for stage in (1, 2):
        for compile_first in (True, False):
            pools(2).run(compiled_curve, stage, compile_first)
    for text in pools(2).run(compiled_in_stage_3):
        assert "expected stage 1 or 2" in text


def another_world(stage: int) -> list[str]:
    found = []
    dist.init_distributed("gloo", verbose=False)
    model = make_model()
    handle = registered(model, stage)
    optimizer = sgd(handle)
    handle.attach(optimizer)
    model(data()).sum().backward()
    dist.destroy_process_group()
    dist.init_distributed("gloo", verbose=False)
    for body in (lambda: model(torch.ones(2, 5)), optimizer.step, handle.gather, handle.state_dict):
        with pytest.raises(ArgumentError, match="the world was set up anew") as caught:
            body()
        found.append(str(caught.value).partition(":")[0])
    dist.destroy_process_group()
    return found


def test_another_world_is_noticed(bare_pools: Pools) -> None:
    for stage in (1, 3):
        for found in bare_pools(2).run(another_world, stage):
            assert found == ["forward", "optimizer.step", "gather", "state_dict"]
