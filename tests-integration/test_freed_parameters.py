"""Parameters of stage 3 outside of a forward and a backward: what raises, what works, and what copies hold."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import comm_orchestrator as dist
from comm_collectives.hooks import Sharded, register_sharded_hooks
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.testing import RankPool, run_ranks_outcomes

Pools = Callable[[int], RankPool]


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def registered(model: nn.Module, stage: int = 3, **options: Any) -> Sharded:
    handle = register_sharded_hooks(model, stage, **options)
    assert handle is not None
    return handle


READS: dict[str, Callable[[nn.Sequential], Any]] = {
    "data": lambda model: model[0].weight.data,
    "detach": lambda model: model[0].weight.detach(),
    "sum": lambda model: sum(one.square().sum() for one in model.parameters()),
    "a comparison": lambda model: model[0].weight == 1,
    "item": lambda model: model[0].weight[0, 0].item(),
    "numpy": lambda model: model[0].weight.numpy(),
    "to_vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "deepcopy": copy.deepcopy,
    "deepcopy of a module": lambda model: copy.deepcopy(model[0]),
    "pickle": lambda model: pickle.dumps(dict(model.named_parameters())),
    "save": lambda model: torch.save(list(model.parameters()), io.BytesIO()),
    "linear": lambda model: nn.functional.linear(torch.ones(1, 5), model[0].weight),
    "init": lambda model: nn.init.zeros_(model[0].weight),
    "write": lambda model: setattr(model[0].weight, "data", torch.zeros(7, 5)),
    "convert": lambda model: model.double(),
}


def reads() -> dict[str, str]:
    found = {}
    model = make_model()
    with registered(model) as handle:
        optimizer = torch.optim.SGD(handle.parameter_groups(), lr=0.1)
        handle.attach(optimizer)
        for step in range(2):  # as the registration leaves it, and as a step does
            for name, read in READS.items():
                with pytest.raises(ArgumentError) as caught:
                    read(model)
                found[f"{name}, {step}"] = str(caught.value)
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
    for name in ("data", "detach", "sum", "deepcopy", "pickle", "linear"):
        READS[name](model)
    return found


def test_reads_of_freed_values_name_the_parameter_and_the_remedy(pools: Pools) -> None:
    for found in pools(2).run(reads):
        for text in found.values():
            assert "got parameter '0.weight' of a model with the hooks of register_sharded_hooks(stage=3)" in text
            assert "handle.full_parameters()" in text
        assert found["deepcopy, 0"].startswith("copy.deepcopy: ")
        assert found["data, 1"].startswith("data: ")


def works() -> None:
    model = make_model()
    parameters = list(model.parameters())
    shapes = [one.shape for one in parameters]
    with registered(model) as handle:
        assert [one.shape for one in model.parameters()] == shapes
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
        assert all(isinstance(one, nn.Parameter) and one.is_leaf and one.requires_grad for one in parameters)
        assert sum(one.numel() for one in parameters) == 7 * 5 + 7 + 2 * 7 + 7 * 3 + 3
        assert torch.zeros_like(parameters[0]).eq(0).all()
        assert parameters[0].new_ones(2).dtype == torch.float32
        assert "'0.weight' of shape (7, 5) and torch.float32" in f"{parameters[0]} {parameters[0]!r}"
        assert all(one.grad is None for one in parameters)
        model.zero_grad()
        model.to("cpu").float().train()
        model[1].register_buffer("more", torch.ones(1))
        assert nn.Sequential(nn.Tanh(), model).get_submodule("1.0") is model[0]
        assert handle.state_dict()["model"]["1.more"].tolist() == [1.0]
        assert handle.memory().parameter_bytes > 0


def test_what_needs_no_values_works(pools: Pools) -> None:
    pools(2).run(works)


def copies(stage: int) -> None:
    model, expected = make_model(), make_model().state_dict()
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    with registered(model, stage) as handle:
        optimizer = torch.optim.SGD(handle.parameter_groups(), lr=0.1)
        handle.attach(optimizer)
        with handle.full_parameters():
            other, state, layer = copy.deepcopy(model), model.state_dict(), copy.deepcopy(model[0])
            parameters = pickle.loads(pickle.dumps(dict(model.named_parameters())))
            # It would hold what belongs to this process.
            with pytest.raises(ArgumentError, match=r"^pickle: got a model .*; save handle.full_state_dict\(\), or"):
                torch.save(model, io.BytesIO())
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        assert all(torch.equal(one, expected[name]) for name, one in parameters.items())
        # A copy is an ordinary model: nothing of it is sent, so one rank may use it.
        if dist.get_rank() == 0:
            assert all(torch.equal(one, expected[name]) for name, one in other.state_dict().items())
            other.load_state_dict(expected)
            other(inputs).sum().backward()
            assert other[0].weight.grad.shape == (7, 5)
            torch.testing.assert_close(layer(inputs), other[0](inputs))
        model(inputs).sum().backward()
        optimizer.step()
        assert all(torch.equal(one, expected[name]) for name, one in layer.state_dict(prefix="0.").items())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_made_of_full_parameters_are_ordinary_models(pools: Pools, stage: int) -> None:
    pools(2).run(copies, stage)


def writes() -> None:
    model, expected = make_model(), make_model(seed=1).state_dict()
    with registered(model) as handle:
        with handle.full_parameters(writes=True):
            for name, one in model.named_parameters():
                one.data = expected[name].clone()
            with pytest.raises(ArgumentError, match="load_state_dict: got assign=True"):
                model.load_state_dict(expected, assign=True)
        whole = handle.full_state_dict()
        assert all(torch.equal(whole[name], expected[name]) for name, _ in model.named_parameters())


def test_writes_that_replace_the_data_of_a_parameter_are_kept(pools: Pools) -> None:
    pools(2).run(writes)


class Decayed(nn.Module):
    """Reads parameters of its layers that it holds in a list of its own, which no attribute announces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.decayed = [layer.weight for layer in self.layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean() + 0.1 * sum(one.square().sum() for one in self.decayed)


def reads_in_a_forward(size_bytes: int) -> list[list[float]]:
    losses: list[list[float]] = [[], []]
    model, plain = Decayed(), Decayed()
    with registered(model, bucket_size_bytes=size_bytes) as handle:
        optimizers = [torch.optim.SGD(one, lr=0.1) for one in (handle.parameter_groups(), plain.parameters())]
        handle.attach(optimizers[0])
        for _ in range(4):
            for curve, one, optimizer in zip(losses, (model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                loss = one(torch.arange(10.0).view(2, 5))
                loss.backward()
                optimizer.step()
                curve.append(loss.item())
    return losses


@pytest.mark.parametrize("size_bytes", [1, 1 << 20])
def test_parameters_that_a_forward_reads_by_other_references(pools: Pools, size_bytes: int) -> None:
    for sharded, plain in pools(2).run(reads_in_a_forward, size_bytes):
        torch.testing.assert_close(torch.tensor(sharded), torch.tensor(plain))


def aliases_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    return [parameter.data[0], parameter.detach(), parameter.detach().view(-1), parameter.data.t()]


def aliases() -> None:
    """Hold tensors that share the memory of a parameter, made where all parameters are there and in passes."""
    model, expected, inputs = make_model(), aliases_of(make_model()[0].weight), torch.arange(20.0).view(4, 5).cos()
    size_bytes = 7 * 5 * 4
    with registered(model, bucket_size_bytes=1) as handle:
        optimizer = torch.optim.SGD(handle.parameter_groups(), lr=0.1)
        handle.attach(optimizer)
        found: list[torch.Tensor] = []

        def hold(module: nn.Module, inputs: Any, outputs: Any) -> None:
            found.extend(aliases_of(module.weight))

        with handle.full_parameters():
            held = aliases_of(model[0].weight)
        hook = model[0].register_forward_hook(hold)
        model.eval()
        with torch.no_grad():
            model(inputs)
        with torch.inference_mode():
            model(inputs)
        held += found
        model.train()
        found.clear()
        # Those that a forward makes for its backward share the memory as well, which has to be freed for them.
        freed_bytes = handle.memory().parameter_bytes
        outputs = model(inputs)
        outputs.square().sum().backward()
        optimizer.step()
        assert abs(handle.memory().parameter_bytes - freed_bytes) < size_bytes
        hook.remove()
        # The values at the time, and nothing of the step.
        for one, other in zip(held, 3 * expected, strict=True):
            assert torch.equal(one, other)
        with handle.full_parameters(writes=True):
            whole = model[0].weight.detach()
            assert not torch.equal(whole, expected[1])
            whole.fill_(2.0)
        assert handle.full_state_dict()["0.weight"].eq(2.0).all()
        held = []
        model(inputs).sum().backward()
        optimizer.step()


def test_tensors_that_share_the_memory_of_a_parameter_may_stay(pools: Pools) -> None:
    pools(2).run(aliases)


def forwards_within(size_bytes: int, with_gradients: bool) -> None:
    model, plain, inputs = make_model(), make_model(), torch.arange(20.0).view(4, 5).cos()
    for one in (model, plain):
        one.eval()
    with registered(model, bucket_size_bytes=size_bytes) as handle:
        with handle.full_parameters(), torch.set_grad_enabled(with_gradients):
            for one in model.parameters():
                one.detach().zero_()  # stands for averaged weights, which are lost after the block
            assert not model(inputs).any()
            assert not model(inputs).any()
            assert not any(one.any() for one in model.state_dict().values() if one.dim() > 1)
            assert not any(one.any() for one in model.parameters())
        torch.testing.assert_close(model(inputs), plain(inputs))
        with handle.full_parameters(writes=True), torch.set_grad_enabled(with_gradients):
            model(inputs)
            model[0].weight.detach().mul_(2.0)
            assert model[2].bias.isfinite().all()
        plain[0].weight.detach().mul_(2.0)
        whole = handle.full_state_dict()
        assert all(torch.equal(whole[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("size_bytes", [1, 1 << 20])
def test_a_forward_within_full_parameters_leaves_them_there(
    pools: Pools, size_bytes: int, with_gradients: bool
) -> None:
    pools(2).run(forwards_within, size_bytes, with_gradients)


def penalty_of(model: nn.Module) -> torch.Tensor:
    return sum((one.square().sum() for one in model.parameters()), torch.zeros(()))


def penalties(size_bytes: int) -> None:
    """Add a penalty on parameters to the loss, and run the backward where these are freed."""
    model, plain = make_model(), make_model()
    with registered(model, bucket_size_bytes=size_bytes) as handle:
        optimizers = [torch.optim.SGD(one, lr=0.1) for one in (handle.parameter_groups(), plain.parameters())]
        handle.attach(optimizers[0])
        inputs = torch.arange(20.0).view(4, 5).cos()
        for loss_within, backward_within in ((False, False), (True, False), (True, True)):
            for one, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                loss = torch.zeros(()) if loss_within else one(inputs).square().mean()
                with handle.full_parameters():
                    if loss_within:
                        loss = one(inputs).square().mean()
                    loss = loss + penalty_of(one)
                    if backward_within:
                        loss.backward()
                if not backward_within:
                    loss.backward()
                optimizer.step()
            whole = handle.full_state_dict()
            for name, value in plain.named_parameters():
                torch.testing.assert_close(whole[name], value.detach())
        with handle.full_parameters():
            loss = penalty_of(model)
            with torch.no_grad():
                model[2].bias.zero_()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: one of shape \(3,\)"):
            loss.backward()
        model(inputs).sum().backward()


@pytest.mark.parametrize("size_bytes", [1, 1 << 20])
def test_penalties_on_parameters_are_those_of_one_process(pools: Pools, size_bytes: int) -> None:
    pools(2).run(penalties, size_bytes)


class Labelled(nn.Parameter):
    """A parameter that says what its dimensions are."""

    axes: tuple[str, ...]

    def __new__(cls, data: torch.Tensor, axes: tuple[str, ...] = ()) -> Labelled:
        made = super().__new__(cls, data)
        made.axes = axes
        return made


def subclasses() -> list[str]:
    model, plain = make_model(), make_model()
    model[0].weight = Labelled(model[0].weight.detach(), ("out", "in"))
    inputs = torch.arange(20.0).view(4, 5).cos()
    with registered(model) as handle:
        optimizers = [torch.optim.SGD(one, lr=0.1) for one in (handle.parameter_groups(), plain.parameters())]
        handle.attach(optimizers[0])
        for _ in range(2):
            weight = model[0].weight
            assert isinstance(weight, Labelled)
            assert weight.axes == ("out", "in")
            assert "'0.weight' of shape (7, 5)" in repr(weight)
            for read in READS.values():
                with pytest.raises(ArgumentError, match=r"got parameter '0.weight' of a model with the hooks"):
                    read(model)
            for one, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                one(inputs).square().sum().backward()
                optimizer.step()
        with handle.full_parameters():
            assert type(model[0].weight) is Labelled
            torch.testing.assert_close(model[0].weight.detach(), plain[0].weight.detach())
    assert type(model[0].weight) is Labelled
    found = []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model[2].weight = nn.Parameter(distribute_tensor(model[2].weight.detach(), mesh))
    for stage in (1, 2, 3):
        with pytest.raises(ArgumentTypeError) as caught:
            register_sharded_hooks(model, stage)
        found.append(str(caught.value))
    return found


def test_subclasses_of_parameter_are_parameters(pools: Pools) -> None:
    for found in pools(2).run(subclasses):
        for text in found:
            assert "parameter '2.weight' is a DTensor, which stands for other tensors" in text


def leave_by_an_exception_of_one_rank() -> None:
    dist.init_distributed("gloo", timeout=20, verbose=False)
    model = make_model()
    with registered(model):
        if dist.get_rank() == 0:
            raise ValueError("of this rank")
        while True:
            dist.all_reduce(torch.ones(1))


def test_an_exception_that_leaves_the_hooks_is_not_covered_by_their_removal() -> None:
    first, other = run_ranks_outcomes(leave_by_an_exception_of_one_rank, 2, env={"CUDA_VISIBLE_DEVICES": ""})
    assert (first.exception_type, first.message) == ("ValueError", "of this rank")
    assert "after ValueError, its hooks could not be removed in order: " in first.stderr
    assert other.exception_type in ("CollectiveMismatchError", "PeerLostError")
