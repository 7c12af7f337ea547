"""Data-parallel hooks: the gradients and the training of DDP and of one process."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import comm_orchestrator as dist
from comm_collectives.hooks import initial_state, synchronization
from comm_collectives.hooks.gradient_buckets import GradientBucket
from comm_orchestrator.facade import hooks
from comm_utils.errors import ArgumentError, ArgumentTypeError, CollectiveMismatchError
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]
Options = hooks.DataParallelOptions
Reduction = hooks.GradientReduction

pytestmark = pytest.mark.cpu
WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3])
#: So small that models of a test have several buckets.
SMALL = {"bucket_size_bytes": 250, "first_bucket_size_bytes": 100}


class Net(nn.Module):
    """A model with tied weights, a layer that not every rank uses, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.hidden = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.sometimes = nn.Linear(6, 6)
        self.never = nn.Linear(3, 3)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, use: bool = True) -> torch.Tensor:
        inner = self.norm(torch.tanh(self.hidden(self.embedding(tokens))))
        return self.head(self.sometimes(inner) if use else inner)


def made(kind: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def batches(steps: int, rank: int, size: int = 4) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        yield torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)


def gradients_of(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if one.grad is None else one.grad.clone() for one in model.parameters()]


def assert_close(got: nn.Module, expected: nn.Module, tolerance: float = 1e-6) -> None:
    for (name, one), other in zip(got.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: name + text)


def trains_as_one_process(set_to_none: bool, options: dict[str, Any]) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    # Other parameters on every rank: those of the first one count.
    model, alone = made(mlp, seed=1 + rank), made(mlp)
    with hooks.register_data_parallel_hooks(model, Options(**SMALL, **options)) as handle:
        optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, alone)]
        for step in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=set_to_none)
            inputs, targets = list(batches(step + 1, rank))[-1]
            F.mse_loss(model(inputs), targets).backward()
            every = [list(batches(step + 1, other))[-1] for other in range(W)]
            inputs, targets = (torch.cat(parts) for parts in zip(*every, strict=True))
            F.mse_loss(alone(inputs), targets).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert_close(model, alone, 1e-5)
        assert [len(one) for one in handle.buckets] == [3, 1, 2]


@WORLD_SIZES
def test_training_is_that_of_one_process(pools: Pools, world_size: int) -> None:
    for set_to_none in (True, False):
        pools(world_size).run(trains_as_one_process, set_to_none, {})
    pools(world_size).run(trains_as_one_process, True, {"overlap": False})


def gradients_are_those_of_ddp(options: dict[str, Any]) -> None:
    rank = dist.get_rank()
    model = made(Net)
    reference = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    handle = hooks.register_data_parallel_hooks(model, Options(**SMALL, **options))
    assert handle is not None
    for step in range(4):
        tokens = torch.arange(5) + rank
        use = step != 1 or rank == 0  # in the second step, one rank alone uses the layer; in the third, none
        use = use and step != 2
        for one in (model, reference):
            one.zero_grad(set_to_none=True)
            F.cross_entropy(one(tokens % 7, use), (tokens + step) % 7).backward()
        for name, parameter in model.named_parameters():
            expected = reference.module.get_parameter(name).grad
            if expected is None:
                assert parameter.grad is None, name
            else:
                torch.testing.assert_close(parameter.grad, expected, msg=f"{step} {name}")
        for name, buffer in model.named_buffers():
            if rank == 0:
                torch.testing.assert_close(buffer, reference.module.get_buffer(name))
    assert sum(map(len, handle.buckets)) == 9
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, model.norm.running_mean.tolist())
    assert everyones.count(everyones[0]) == len(everyones)
    handle.remove()


@WORLD_SIZES
def test_gradients_are_those_of_ddp(pools: Pools, world_size: int) -> None:
    pools(world_size).run(gradients_are_those_of_ddp, {})


def accumulates(set_to_none: bool) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    model, alone = made(mlp), made(mlp)
    handle = hooks.register_data_parallel_hooks(model, Options(**SMALL))
    for _ in range(3):
        for one in (model, alone):
            one.zero_grad(set_to_none=set_to_none)
        dist.configure(enabled=True)
        dist.reset_log()
        micro_batches = list(batches(3, rank))
        with handle.no_sync():
            for inputs, targets in micro_batches[:2]:
                F.mse_loss(model(inputs), targets).backward()
        assert not dist.log_rows()
        inputs, targets = micro_batches[2]
        F.mse_loss(model(inputs), targets).backward()
        assert dist.log_rows()
        dist.configure(enabled=False)
        for other in range(W):
            for inputs, targets in batches(3, other):
                (F.mse_loss(alone(inputs), targets) / W).backward()
        for one, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad, expected.grad)
    model.zero_grad()
    with handle.no_sync():
        inputs, targets = next(batches(1, rank))
        F.mse_loss(model(inputs), targets).backward()
    handle.reduce_gradients()
    alone.zero_grad()
    for other in range(W):
        inputs, targets = next(batches(1, other))
        (F.mse_loss(alone(inputs), targets) / W).backward()
    # Added to what is averaged already.
    inputs, targets = list(batches(2, rank))[-1]
    F.mse_loss(model(inputs), targets).backward()
    for other in range(W):
        inputs, targets = list(batches(2, other))[-1]
        (F.mse_loss(alone(inputs), targets) / W).backward()
    for one, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, expected.grad)
    handle.remove()


@WORLD_SIZES
def test_gradients_accumulate_without_communication(pools: Pools, world_size: int) -> None:
    for set_to_none in (True, False):
        pools(world_size).run(accumulates, set_to_none)


class Mixed(nn.Module):
    """Linear layers of two dtypes, in turn."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (torch.float32, torch.bfloat16, torch.float64, torch.bfloat16, torch.float32)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=kind) for kind in kinds)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs.to(layer.weight.dtype))
        return inputs.float()


def reduces_every_dtype(options: dict[str, Any], tolerance: float, scale: bool) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    model = made(Mixed)
    plain = copy.deepcopy(model)
    handle = hooks.register_data_parallel_hooks(model, Options(reduction=Reduction(**options), **SMALL))
    for step in range(3):
        inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + one)) for one in range(W)]
        model.zero_grad()
        model(inputs[rank]).square().sum().backward()
        expected: list[torch.Tensor] = []
        for one in inputs:
            plain.zero_grad()
            plain(one).square().sum().backward()
            mine = [parameter.grad.double() for parameter in plain.parameters()]
            expected = [a + b for a, b in zip(expected, mine, strict=True)] if expected else mine
        for (name, parameter), total in zip(model.named_parameters(), expected, strict=True):
            total /= W if scale else 1
            assert parameter.grad is not None
            assert parameter.grad.dtype == parameter.dtype
            error = float((parameter.grad.double() - total).abs().max() / total.abs().max())
            limit = max(
                tolerance if parameter.dtype is not torch.float64 else 0, 4e-2 * (parameter.dtype.itemsize == 2)
            )
            assert error <= max(limit, 1e-5), (name, step, error)
    handle.remove()


REDUCTIONS: list[tuple[dict[str, Any], float, bool]] = [
    ({}, 1e-5, True),
    ({"op": "sum"}, 1e-5, False),
    ({"prescale": True}, 1e-5, True),
    ({"predivide_factor": 4.0}, 1e-5, True),
    ({"op": "sum", "predivide_factor": 2}, 1e-5, False),
    ({"compression": "fp16"}, 2e-3, True),
    ({"compression": "int8"}, 3e-2, True),
    ({"op": "sum", "compression": dist.Compression("int8", error_feedback=True)}, 5e-2, False),
]


@WORLD_SIZES
def test_every_reduction_of_every_dtype(pools: Pools, world_size: int) -> None:
    for options, tolerance, scale in REDUCTIONS:
        pools(world_size).run(reduces_every_dtype, options, tolerance, scale)


def unused_with_compression() -> None:
    rank = dist.get_rank()
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    with hooks.register_data_parallel_hooks(model, Options(reduction=Reduction(compression="int8"))):
        for _ in range(2):
            model.zero_grad()
            sum((one(torch.ones(64)) * 1e6).sum() for one in model[: 1 + (rank == 1)]).backward()
            assert [one.weight.grad is None for one in model] == [False, dist.get_world_size() == 1, True]


@WORLD_SIZES
def test_what_ranks_used_is_exact_with_compression(pools: Pools, world_size: int) -> None:
    pools(world_size).run(unused_with_compression)


def sparse(stays: bool) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    model = nn.ModuleDict({"a": nn.Embedding(9, 4, sparse=True), "b": nn.EmbeddingBag(5, 3, sparse=True)})
    model["c"], model["unused"] = nn.Linear(4, 3), nn.Embedding(2, 2, sparse=True)
    plain = copy.deepcopy(model)
    handle = hooks.register_data_parallel_hooks(model, Options(sparse_gradients=stays))
    plain.load_state_dict(model.state_dict())

    def loss_of(model: nn.ModuleDict, rank: int) -> torch.Tensor:
        tokens = torch.tensor([0, 2, 2, rank + 3][: 2 + rank])
        loss = model["c"](model["a"](tokens)).square().sum()
        return loss if rank == 0 else loss + model["b"](tokens[None] % 5).square().sum()

    for _ in range(2):
        for one in (model, plain):
            one.zero_grad()
        loss_of(model, rank).backward()
        for other in range(W):
            (loss_of(plain, other) / W).backward()
        for (name, one), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            if expected.grad is None:
                assert one.grad is None, name
                continue
            assert one.grad is not None, name
            assert one.grad.is_sparse == (stays and name != "c.weight" and name != "c.bias")
            torch.testing.assert_close(one.grad.to_dense(), expected.grad.to_dense())
    handle.remove()


def tied_sparse() -> None:
    """Use the rows of an embedding on all ranks, and all of it on the first rank, as its head."""
    rank, W = dist.get_rank(), dist.get_world_size()
    model = made(lambda: nn.Embedding(5, 3, sparse=True))
    plain = copy.deepcopy(model)

    def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
        rows = model(torch.tensor([rank, 2]))
        return (rows if rank else F.linear(rows, cast("torch.Tensor", model.weight))).square().sum()

    with hooks.register_data_parallel_hooks(model):
        optimizers = [torch.optim.Adam(one.parameters(), 0.1) for one in (model, plain)]
        for _ in range(2):
            for one in optimizers:
                one.zero_grad()
            loss_of(model, rank).backward()
            sum(loss_of(plain, other) / W for other in range(W)).backward()
            torch.testing.assert_close(model.weight.grad, plain.weight.grad)
            for one in optimizers:
                one.step()  # Adam refuses sparse gradients


@WORLD_SIZES
def test_gradients_of_a_tied_sparse_embedding_are_dense(pools: Pools, world_size: int) -> None:
    pools(world_size).run(tied_sparse)


def large_sparse() -> None:
    model = nn.Embedding(4, 3, sparse=True).half()
    with hooks.register_data_parallel_hooks(model):
        (model(torch.tensor([1])) * 40000.0).sum().backward()
        assert model.weight.grad.is_coalesced()
        assert model.weight.grad.dtype == torch.float16
        assert torch.equal(model.weight.grad.to_dense()[1], torch.full((3,), 40000.0, dtype=torch.float16))


def test_averages_of_large_sparse_gradients(pools: Pools) -> None:
    pools(2).run(large_sparse)


@WORLD_SIZES
@pytest.mark.parametrize("stays", [True, False])
def test_sparse_gradients(pools: Pools, world_size: int, stays: bool) -> None:
    pools(world_size).run(sparse, stays)


def leaves_no_trace() -> None:
    rank = dist.get_rank()
    used = dist.shared_memory_stats()["used_bytes"]
    first, second = made(mlp), made(mlp, seed=2)
    hands = [hooks.register_data_parallel_hooks(one) for one in (first, second)]
    for step in range(2):
        inputs, targets = list(batches(step + 1, rank))[-1]
        (F.mse_loss(first(inputs), targets) + F.mse_loss(second(inputs), targets)).backward()
    kept = [gradients_of(one) for one in (first, second)]
    copied = copy.deepcopy(first)
    copied(inputs).sum().backward()  # a copy has no hooks
    for one in hands:
        one.remove()
        one.remove()
    for model, gradients in zip((first, second), kept, strict=True):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert torch.equal(parameter.grad, gradient)
            assert parameter.grad.untyped_storage().nbytes() == parameter.grad.nbytes
            assert not parameter._post_accumulate_grad_hooks
    assert dist.shared_memory_stats()["used_bytes"] == used
    with pytest.raises(ArgumentError, match="reduce_gradients: the hooks were removed"):
        hands[0].reduce_gradients()
    first.zero_grad()
    dist.configure(enabled=True)
    dist.reset_log()
    first(torch.full((1, 4), float(rank))).sum().backward()
    assert not dist.log_rows()
    dist.configure(enabled=False)


@WORLD_SIZES
def test_two_models_and_removal(pools: Pools, world_size: int) -> None:
    pools(world_size).run(leaves_no_trace)


def uses_a_layer_on_one_rank(kinds: tuple[str | int, str | int], order: tuple[int, int]) -> None:
    """Compare with one process where rank 1 does not use the last layer, whose handle is complete late there alone."""
    rank = dist.get_rank()

    def two_models() -> list[nn.ModuleDict]:
        return [made(lambda: nn.ModuleDict({"p": nn.Linear(4, 4), "q": nn.Linear(4, 4)}), seed) for seed in (1, 2)]

    def loss(last: nn.ModuleDict, first: nn.ModuleDict, of_rank: int, step: int) -> torch.Tensor:
        inner = last["p"](first["q"](first["p"](torch.full((2, 4), 0.1 + of_rank))))
        return (inner if of_rank and step else last["q"](inner)).square().sum()

    models, alone = two_models(), two_models()
    handles: dict[int, Any] = {}
    optimizers = [torch.optim.SGD(nn.ModuleList(alone).parameters(), 0.01)]
    for place in order:
        kind, model = kinds[place], models[place]
        sharded = kind != "data parallel"
        handle: Any = (
            hooks.register_sharded_hooks(model, kind) if sharded else hooks.register_data_parallel_hooks(model)
        )
        optimizers.append(torch.optim.SGD(handle.parameter_groups() if sharded else model.parameters(), 0.01))
        if sharded:
            handle.attach(optimizers[-1])
        handles[place] = handle
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(*models, rank, step).backward()
        sum(loss(*alone, other, step) / 2 for other in range(2)).backward()
        for optimizer in optimizers:
            optimizer.step()
    for place, handle in handles.items():
        model, expected = models[place], alone[place]
        state = handle.full_state_dict() if hasattr(handle, "full_state_dict") else model.state_dict()
        for name, one in expected.state_dict().items():
            torch.testing.assert_close(state[name], one, rtol=1e-5, atol=1e-6)
        handle.remove()


@pytest.mark.parametrize("kinds", [("data parallel",) * 2, (1, 1), (2, 2), ("data parallel", 3), (2, "data parallel")])
def test_handles_of_one_group_reduce_in_one_order(pools: Pools, kinds: tuple[str | int, str | int]) -> None:
    for order in ((0, 1), (1, 0)):
        pools(2).run(uses_a_layer_on_one_rank, kinds, order)


def goes_on_after_a_failed_backward() -> None:
    model = made(mlp)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            return given.clone()

        @staticmethod
        def backward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    with hooks.register_data_parallel_hooks(model, Options(**SMALL)):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model[2:](Fails.apply(model[:2](torch.ones(1, 4)))).sum().backward()
            assert averages(model)


def test_training_goes_on_after_a_failed_backward(pools: Pools) -> None:
    pools(2).run(goes_on_after_a_failed_backward)


def zeroes_gradients_after_a_failed_backward() -> None:
    """Have rank 1 start reductions when rank 0 has zeroed its gradients, which stay in place."""
    rank = dist.get_rank()
    model = made(mlp)
    is_zeroed = dist.new_group([0, 1])

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            return given.clone()

        @staticmethod
        def backward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    def wait(gradient: torch.Tensor) -> None:
        if rank:
            dist.barrier(is_zeroed)

    with hooks.register_data_parallel_hooks(model, Options(**SMALL)):
        model(torch.ones(1, 4)).sum().backward()
        expected = [one.grad.clone() for one in model.parameters() if one.grad is not None]
        model.zero_grad(set_to_none=False)
        output = model[2:](Fails.apply(model[:2](torch.ones(1, 4)))) * 100
        output.register_hook(wait)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        model.zero_grad(set_to_none=False)
        if not rank:
            dist.barrier(is_zeroed)
        model(torch.ones(1, 4)).sum().backward()
        for one, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(one.grad, gradient)


def test_gradients_that_stay_are_zeroed_after_a_failed_backward(pools: Pools) -> None:
    pools(2).run(zeroes_gradients_after_a_failed_backward)


def zeroes_gradients_after_a_failed_end() -> None:
    """Fail at the end of a backward, where the other of two handles refuses a gradient, on which both ranks agree."""
    first, second = made(mlp), Product()
    with (
        hooks.register_data_parallel_hooks(first, Options(**SMALL)),
        hooks.register_data_parallel_hooks(second, Options(bucket_size_bytes=1, first_bucket_size_bytes=1)),
    ):
        first(torch.ones(1, 4)).sum().backward()
        expected = [one.grad.clone() for one in first.parameters() if one.grad is not None]
        first.zero_grad(set_to_none=False)
        loss = first(torch.ones(1, 4)).sum() * 100 + second(torch.ones(4))
        with pytest.raises(ArgumentError, match="differentiated again"):
            loss.backward(create_graph=True)
        first.zero_grad(set_to_none=False)
        first(torch.ones(1, 4)).sum().backward()
        for one, gradient in zip(first.parameters(), expected, strict=True):
            torch.testing.assert_close(one.grad, gradient)


def test_gradients_that_stay_are_zeroed_after_a_failed_end_of_a_backward(pools: Pools) -> None:
    pools(2).run(zeroes_gradients_after_a_failed_end)


def leaves_parameters_out() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    for by_name in (True, False):
        model: Any = made(mlp, seed=1 + rank)
        model[2].extra = nn.Parameter(torch.ones(1 + rank))  # of this rank alone, and of another shape
        model[4].bias.requires_grad_(False)
        nn.init.constant_(model[0].weight, rank)
        nn.init.constant_(model[4].bias, rank)
        ignored = {"0.weight": model[0].weight, "2.extra": model[2].extra, "4.bias": model[4].bias}
        given = set(ignored) if by_name else iter(ignored.values())
        with dist.register_data_parallel_hooks(model, Options(**SMALL), ignored_parameters=given) as handle:
            for _ in range(2):
                model.zero_grad()
                (model(torch.full((1, 4), rank + 1.0)) * model[2].extra.sum()).sum().backward()
            assert model[0].weight.eq(rank).all()
            assert model[4].bias.eq(rank).all()
            assert set(handle.parameters) == {"0.bias", "2.weight", "2.bias", "4.weight"}
            assert {name for names in handle.buckets for name in names} == set(handle.parameters)
            for name, one in model.named_parameters():
                everyones: list[Any] = [None] * W
                dist.all_gather_object(everyones, None if one.grad is None else one.grad.tolist())
                is_same = everyones.count(everyones[0]) == W
                assert is_same == (name not in ignored or name == "4.bias" or W == 1), name
            model[4].bias.requires_grad_(True)
            model(torch.ones(1, 4)).sum().backward()
            with dist.register_data_parallel_hooks(nn.ParameterList([model[0].weight])):
                assert model[0].weight.eq(0).all()
    wrong: list[tuple[Any, str]] = [
        ("0.weight", "ignored_parameters: got '0.weight'; expected a collection of names or parameters"),
        (model[0].bias, "expected a collection of names or parameters"),
        (["0.wieght"], "ignored_parameters: got '0.wieght', which the model does not have; its parameters are"),
        ([nn.Parameter(torch.ones(2, 5))], r"got one of shape \(2, 5\), which the model does not have"),
        ([0], "ignored_parameters: got 0; expected a name or a parameter"),
        (model.parameters(), "got one without parameters that require gradients"),
    ]
    for given, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            hooks.register_data_parallel_hooks(model, ignored_parameters=given)


@WORLD_SIZES
def test_parameters_that_are_left_out(pools: Pools, world_size: int) -> None:
    pools(world_size).run(leaves_parameters_out)


def averages(model: nn.Module) -> bool:
    """Return whether a backward leaves the same gradients on all ranks."""
    model.zero_grad()
    model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, [one.tolist() for one in gradients_of(model)])
    return everyones.count(everyones[0]) == len(everyones)


def goes_on_without_memory_for_a_bucket(overlap: bool) -> None:
    made_buckets = 0

    class Bucket(GradientBucket):
        def __init__(self, *arguments: Any) -> None:
            nonlocal made_buckets
            made_buckets += 1
            if made_buckets == 2:
                raise MemoryError
            super().__init__(*arguments)

    model = made(mlp)
    with hooks.register_data_parallel_hooks(model, Options(overlap=overlap, **SMALL)) as handle:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(synchronization, "GradientBucket", Bucket)
            with pytest.raises(MemoryError):
                model(torch.ones(1, 4)).sum().backward()
        assert handle.buckets == []
        for _ in range(2):
            assert averages(model)
        assert [len(one) for one in handle.buckets] == [3, 1, 2]


def test_training_goes_on_after_memory_ran_out(pools: Pools) -> None:
    for overlap in (True, False):
        pools(2).run(goes_on_without_memory_for_a_bucket, overlap)


class Scaled(nn.Module):
    """Its graphs save two buffers; one is a new one in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("mask", torch.ones(3))

    def forward(self, given: torch.Tensor, scale: float) -> torch.Tensor:
        self.scale = torch.full((1,), scale)
        return (self.linear(given) / self.scale + self.norm(given).mean()) * self.mask


def graphs_that_saved_buffers() -> None:
    rank, model = dist.get_rank(), Scaled()
    given = torch.rand(4, 3)
    with hooks.register_data_parallel_hooks(model) as handle:
        first, second = model(given, 2.0), model(given + rank, 2.0)  # alike on all ranks, but for the averages
        before = model.mask._version
        for loss in (first[0, 0], first[0, 1], second[0, 0]):
            loss.backward(retain_graph=True)
        assert model.mask._version == before
        model.zero_grad()
        output = model(torch.ones(2, 3), rank + 1.0)
        output[0, 0].backward(retain_graph=True)
        assert model.scale.item() == 1.0
        with handle.no_sync():
            if rank:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    output[0, 1].backward()
            else:
                output[0, 1].backward()


def takes_expanded_buffers_over() -> None:
    """Take over buffers of which all rows have one place in memory."""
    registrations: list[Any] = [hooks.register_data_parallel_hooks, lambda one: hooks.register_sharded_hooks(one, 1)]
    for register in registrations:
        model: Any = nn.Linear(3, 3)
        model.register_buffer("rows", torch.full((2, 1, 3), float(dist.get_rank())).expand(2, 4, 3))
        handle = register(model)
        assert torch.equal(model.rows, torch.zeros(2, 4, 3))
        assert model.rows.stride(1) == 0
        model.rows[:, :1] = dist.get_rank() + 5
        model(torch.ones(1, 3)).sum().backward()
        if register is hooks.register_data_parallel_hooks:
            assert torch.equal(model.rows, torch.full((2, 4, 3), 5.0))
        handle.remove()
    model = nn.Linear(3, 3)
    model.register_buffer("rows", torch.zeros(1, 3).expand(2, 3) if dist.get_rank() else torch.zeros(2, 3))
    with pytest.raises(CollectiveMismatchError, match=r"'rows' of shape \(2, 3\) and float32, with strides \(0, 1\)"):
        hooks.register_data_parallel_hooks(model)


def test_buffers_may_be_expanded(pools: Pools) -> None:
    pools(2).run(takes_expanded_buffers_over)


def test_a_graph_whose_saved_buffer_was_taken_over_raises(pools: Pools) -> None:
    pools(2).run(graphs_that_saved_buffers)


class Product(nn.Module):
    """Has a gradient that can be differentiated again, and before it one that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.squared, self.plain = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return (self.squared**2 * given).sum() + (self.plain * given).sum()


def waits_for_what_a_failed_end_started() -> None:
    model, rank = Product(), dist.get_rank()
    options = Options(bucket_size_bytes=1, first_bucket_size_bytes=1, overlap=False)
    handle = hooks.register_data_parallel_hooks(model, options)
    model(torch.ones(4)).backward()
    assert handle.buckets == [("plain",), ("squared",)]
    model.zero_grad()
    loss = model(torch.full((4,), rank + 1.0))
    reduced = handle._synchronization.buckets[0].flat
    time.sleep(0.5 * rank)  # rank 0 starts to reduce long before the others do
    with pytest.raises(ArgumentError, match="'squared' is to be differentiated again"):
        loss.backward(create_graph=True)
    handle.remove()
    W = dist.get_world_size()
    assert model.plain.grad is None, "of a backward that failed"
    assert torch.equal(reduced[:4], torch.full((4,), (W + 1) / 2))


def test_removal_waits_for_what_a_failed_end_started(pools: Pools) -> None:
    pools(2).run(waits_for_what_a_failed_end_started)


def refuses_to_reduce_sums_again() -> None:
    model, W = made(mlp), dist.get_world_size()
    with hooks.register_data_parallel_hooks(model, Options(reduction=Reduction("sum"))) as handle:
        model(torch.ones(1, 4)).sum().backward()
        for _ in range(2):
            before = [one.clone() for one in gradients_of(model) if one is not None]
            for _ in range(2):
                with pytest.raises(ArgumentError, match=r"reduce_gradients: .* is a sum over all ranks"):
                    handle.reduce_gradients()
            assert all(torch.equal(one, other) for one, other in zip(before, gradients_of(model), strict=True))
            model.zero_grad(set_to_none=False)
            with handle.no_sync():
                model(torch.ones(1, 4)).sum().backward()
            handle.reduce_gradients()
            assert torch.equal(model[-1].bias.grad, torch.full_like(model[-1].bias, W))


def refuses_to_reduce_rows_again() -> None:
    model, W = nn.Embedding(4, 3, sparse=True), dist.get_world_size()
    with hooks.register_data_parallel_hooks(model, Options(reduction=Reduction("sum"))) as handle:
        for set_to_none in (True, False, True):
            model.zero_grad(set_to_none=set_to_none)
            model(torch.tensor([1])).sum().backward()
            assert torch.equal(model.weight.grad.to_dense()[1], torch.full((3,), float(W)))
        with pytest.raises(ArgumentError, match=r"reduce_gradients: .* 'weight' is a sum over all ranks"):
            handle.reduce_gradients()
        with pytest.raises(ArgumentError, match=r"backward: .* 'weight' is a sum over all ranks"):
            model(torch.tensor([1])).sum().backward()


def test_sums_are_not_reduced_again(pools: Pools) -> None:
    pools(2).run(refuses_to_reduce_sums_again)
    pools(2).run(refuses_to_reduce_rows_again)


def refuses_to_add_a_checkpoint_twice() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with hooks.register_data_parallel_hooks(model, Options(reduction=Reduction("sum"))):
        for use_reentrant in (False, True):
            model.zero_grad()
            inner = model[0](torch.ones(2, 3))
            loss = checkpoint(model[1], inner, use_reentrant=use_reentrant).sum()
            if not use_reentrant:
                loss.backward()
                continue
            with pytest.raises(ArgumentError, match="Where a reentrant checkpoint is the last layer, its end reduced"):
                loss.backward()
        model.zero_grad()


def test_sums_of_a_reentrant_checkpoint_are_refused(pools: Pools) -> None:
    pools(2).run(refuses_to_add_a_checkpoint_twice)


def reads_each_size_once() -> None:
    reads = 0

    class Counted(torch.Tensor):
        @property
        def nbytes(self) -> int:
            nonlocal reads
            reads += 1
            return self.numel() * self.element_size()

    rank = float(dist.get_rank())
    tensors = [torch.full((2,), rank).as_subclass(Counted) for _ in range(300)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial_state, "_PIECE_BYTES", 800)
        dist.configure(enabled=True)
        dist.reset_log()
        initial_state.broadcast_tensors(tensors)
        assert sum(row.calls for row in dist.log_rows()) == 3
        dist.configure(enabled=False)
    assert reads < 2 * len(tensors)
    assert all(one.tolist() == [0.0, 0.0] for one in tensors)


def test_many_buffers_take_time_in_proportion(pools: Pools) -> None:
    pools(2).run(reads_each_size_once)


def on_a_part_of_the_ranks() -> int:
    group = dist.new_group([0, 2])
    model = made(mlp, seed=dist.get_rank())
    handle = hooks.register_data_parallel_hooks(model, group=group)
    found = 0
    if handle is None:
        assert dist.get_rank() == 1
    else:
        model(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
        assert torch.equal(model[0].weight.detach(), made(mlp, seed=0)[0].weight.detach())
        found = len(handle.buckets)
        handle.remove()
    dist.barrier()
    if group != dist.NON_GROUP_MEMBER:
        dist.destroy_process_group(group)
    return found


def test_hooks_on_a_sub_group(pools: Pools) -> None:
    assert pools(3).run(on_a_part_of_the_ranks) == [1, 0, 1]


def different_models(kind: str) -> str:
    rank, W = dist.get_rank(), dist.get_world_size()
    odd = rank == W - 1
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5 if odd and kind == "shape" else 4))
    options = Options(bucket_size_bytes=1 << (10 + (odd and kind == "options")))
    if odd:
        if kind == "name":
            model = nn.Sequential(model[0], nn.ReLU(), model[1])
        elif kind == "dtype":
            model[1].to(torch.bfloat16)
        elif kind == "strides":
            model[1].weight = nn.Parameter(torch.zeros(3, 4).t())
        elif kind == "fewer":
            model[1].bias.requires_grad_(False)
        elif kind == "module":
            model = [model]
        elif kind == "twice":
            hooks.DataParallel(model, Options(broadcast_parameters=False), None)
    with pytest.raises((CollectiveMismatchError, ArgumentError)) as caught:
        hooks.register_data_parallel_hooks(model, options)
    dist.barrier()  # the group is of use
    return f"{type(caught.value).__name__}: {caught.value}"


DIFFERENCES = {
    "shape": r"parameter 2 is '1.weight' of shape \(5, 3\) and float32 on rank {odd} and '1.weight' of shape \(4, 3\)",
    "name": r"parameter 2 is '2.weight' of shape \(4, 3\) and float32 on rank {odd} and '1.weight' .* on rank 0",
    "dtype": r"parameter 2 is '1.weight' of shape \(4, 3\) and bfloat16 on rank {odd} and .* float32 on rank 0",
    "strides": r"'1.weight' of shape .* and float32, with strides \(1, 4\) on rank {odd} and '1.weight' .* on rank 0",
    "fewer": r"parameter 3 is missing \(3 parameters\) on rank {odd} and '1.bias' of shape \(4,\) and float32 on",
    "options": r"options: got .*bucket_size_bytes=2048.* on rank {odd} and .*=1024.* on rank 0; expected the same",
}


@pytest.mark.parametrize("world_size", [2, 3])
def test_differences_between_ranks_name_rank_and_parameter(pools: Pools, world_size: int) -> None:
    for kind, expected in DIFFERENCES.items():
        # Of two ranks, neither is right: the first one's counts.
        for message in pools(world_size).run(different_models, kind):
            assert message.startswith("CollectiveMismatchError: register_data_parallel_hooks: "), message
            assert re.search(expected.format(odd=world_size - 1), message), message
    for kind, expected in (("module", "expected a torch.nn.Module"), ("twice", "call remove() of the handle")):
        *others, odd = pools(world_size).run(different_models, kind)
        assert expected in odd
        for message in others:
            assert f"rank {world_size - 1} refused its arguments: register_data_parallel_hooks: model: " in message


class Twice(nn.Module):
    """Uses a layer in two reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, given: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            given = checkpoint(self.inner, given, use_reentrant=True)
        return self.outer(given)


def wrong_uses() -> list[str]:
    found = []

    def refused(action: Callable[[], Any]) -> None:
        with pytest.raises(ArgumentError) as caught:
            action()
        found.append(str(caught.value))

    model: Any = made(mlp)
    handle = hooks.register_data_parallel_hooks(model)
    refused(lambda: hooks.register_data_parallel_hooks(model))
    refused(lambda: hooks.register_data_parallel_hooks(model[2]))
    model[0].bias.requires_grad_(False)
    refused(lambda: model(torch.ones(1, 4)).sum().backward())
    model[0].bias.requires_grad_(True)
    model(torch.ones(1, 4)).sum().backward()
    model.zero_grad()
    refused(lambda: model(torch.ones(1, 4)).sum().backward(create_graph=True))
    model.zero_grad()
    hook = model[0].weight.register_post_accumulate_grad_hook(lambda _: handle.remove())
    refused(lambda: model(torch.ones(1, 4)).sum().backward())
    hook.remove()
    handle.remove()

    model[0].bias.requires_grad_(False)
    with hooks.register_data_parallel_hooks(model):
        model[0].bias.requires_grad_(True)
        refused(lambda: model(torch.ones(1, 4)).sum().backward())
        for one in model.parameters():  # what is trained is swapped: no gradient reaches a hook
            one.requires_grad_(one is model[0].bias)
        refused(lambda: model(torch.ones(1, 4)).sum().backward())
        model.requires_grad_(True)
        refused(lambda: model[2](model[1](model[0](torch.ones(1, 4)))).sum().backward())
    with hooks.register_data_parallel_hooks(model, Options(reduction=Reduction("sum"))) as handle:
        model.zero_grad(set_to_none=False)
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            refused(lambda: model(torch.ones(1, 4)).sum().backward())
            model.zero_grad(set_to_none=False)
            with handle.no_sync():
                model(torch.ones(1, 4)).sum().backward()
            model(torch.ones(1, 4)).sum().backward()
            model.zero_grad()
    model = Twice()
    with hooks.register_data_parallel_hooks(model):
        for _ in range(2):
            refused(lambda: model(torch.ones(2, 3, requires_grad=True), 2).sum().backward())
            model.zero_grad()
            model(torch.ones(2, 3, requires_grad=True), 1).sum().backward()
    refused(lambda: hooks.register_data_parallel_hooks(nn.ReLU()))
    refused(lambda: hooks.register_data_parallel_hooks(made(mlp), {"op": "sum"}))  # type: ignore[arg-type]
    refused(lambda: hooks.register_data_parallel_hooks(made(mlp), opitons=None))  # type: ignore[call-arg]
    return found


def test_wrong_uses_name_the_culprit(pools: Pools) -> None:
    expected = [
        "register_data_parallel_hooks: model: parameter '0.weight' has the hooks of register_data_parallel_hooks()",
        "register_data_parallel_hooks: model: parameter 'weight' has the hooks of register_data_parallel_hooks()",
        "backward: parameter '0.bias' no longer requires a gradient",
        "backward: the gradient of parameter '4.weight' is to be differentiated again (create_graph=True)",
        "remove: a backward is under way",
        *["forward: parameter '0.bias' requires a gradient, which it did not when the hooks were registered"] * 2,
        "backward: parameter '0.bias' requires a gradient, which it did not when the hooks were registered",
        *["backward: the gradient of parameter '4.bias' is a sum over all ranks already"] * 2,
        *["backward: parameter 'inner.bias' got a second gradient in one backward"] * 2,
        "register_data_parallel_hooks: model: got one without parameters that require gradients",
        "register_data_parallel_hooks: options: got {'op': 'sum'}; expected DataParallelOptions",
        "register_data_parallel_hooks: opitons: got an argument of this name, which does not exist",
    ]
    for messages in pools(2).run(wrong_uses):
        assert len(messages) == len(expected), messages
        for message, beginning in zip(messages, expected, strict=True):
            assert message.startswith(beginning), (message, beginning)


def different_buffers(options: dict[str, Any]) -> None:
    model = made(mlp)
    model.register_buffer("count", torch.zeros(2, 3 + dist.get_rank()))
    hooks.register_data_parallel_hooks(model, Options(**options)).remove()


def test_buffers_that_differ_between_ranks(pools: Pools) -> None:
    pools(2).run(different_buffers, {"broadcast_parameters": False, "broadcast_buffers": False})
    with pytest.raises(Exception, match=r"'count' of shape \(2, 4\) and float32 on rank 1 and 'count' of shape"):
        pools(2).run(different_buffers, {})


class Fsdp2(nn.Linear):
    """A layer that looks like one of ``fully_shard()``, whose import takes seconds."""

    def set_requires_gradient_sync(self, requires: bool) -> None:
        """Do nothing."""


def reduced_by_torch() -> list[str]:
    found = []

    def refused(action: Callable[[], Any]) -> None:
        with pytest.raises(ArgumentError) as caught:
            action()
        found.append(str(caught.value))

    model = made(mlp)
    wrapped = DistributedDataParallel(model)
    for one in (wrapped, nn.Sequential(wrapped), Fsdp2(2, 2)):
        refused(lambda one=one: hooks.register_data_parallel_hooks(one))  # type: ignore[misc]
        refused(lambda one=one: hooks.register_sharded_hooks(one, 1))  # type: ignore[misc]
    with hooks.register_data_parallel_hooks(model):
        refused(lambda: wrapped(torch.ones(1, 4)))
        assert averages(model)
        with torch.no_grad():
            wrapped(torch.ones(1, 4))
        assert averages(DistributedDataParallel(copy.deepcopy(model)))
    with hooks.register_data_parallel_hooks(model[2]):  # type: ignore[index]
        refused(lambda: DistributedDataParallel(model)(torch.ones(1, 4)))
    apart = made(mlp)
    apart._ddp_params_and_buffers_to_ignore = ["2.weight", "2.bias"]  # type: ignore[assignment]
    with hooks.register_data_parallel_hooks(apart[2]):  # type: ignore[index]
        assert averages(DistributedDataParallel(apart))
    assert averages(wrapped)
    return found


def test_models_that_torch_reduces_are_refused(pools: Pools) -> None:
    kinds = ["a DistributedDataParallel", "one with a DistributedDataParallel, '0'", "a Fsdp2"]
    calls = ["register_data_parallel_hooks", "register_sharded_hooks"]
    expected = [f"{call}: model: got {kind}, which reduces gradients itself; use" for kind in kinds for call in calls]
    forward = "forward: DistributedDataParallel reduces the gradient of parameter"
    expected += [f"{forward} {name!r}" for name in ("0.weight", "weight")]
    for messages in pools(2).run(reduced_by_torch):
        assert len(messages) == len(expected), messages
        for message, beginning in zip(messages, expected, strict=True):
            assert message.startswith(beginning), (message, beginning)


def test_wrong_settings_are_refused_at_once() -> None:
    wrong: list[tuple[Callable[[], Any], type[ArgumentError], str]] = [
        (lambda: Reduction("max"), ArgumentError, "GradientReduction: op: got 'max'; expected 'avg' or 'sum'"),
        (lambda: Reduction(prescale=1), ArgumentTypeError, "prescale: got 1; expected True or False"),  # type: ignore[arg-type]
        (lambda: Reduction("sum", prescale=True), ArgumentError, "prescale: got True with op='sum'"),
        (lambda: Reduction(prescale=True, predivide_factor=2), ArgumentError, "prescale: got True with predivide_fact"),
        (lambda: Reduction(predivide_factor=0), ArgumentError, "predivide_factor: got 0; expected a finite number"),
        (lambda: Reduction(predivide_factor=float("inf")), ArgumentError, "predivide_factor: got inf; expected"),
        (lambda: Reduction(predivide_factor="2"), ArgumentTypeError, "expected a number"),  # type: ignore[arg-type]
        (lambda: Reduction(compression="zip"), ArgumentError, "GradientReduction: "),
        (lambda: Options(reduction="sum"), ArgumentTypeError, "expected a GradientReduction"),  # type: ignore[arg-type]
        (lambda: Options(bucket_size_bytes=0), ArgumentError, "bucket_size_bytes: got 0; expected 1 byte or more"),
        (lambda: Options(first_bucket_size_bytes=2.5), ArgumentTypeError, "got 2.5; expected a number"),  # type: ignore[arg-type]
        (lambda: Options(overlap="no"), ArgumentTypeError, "overlap: got 'no'; expected True or False"),  # type: ignore[arg-type]
    ]
    for make, kind, expected in wrong:
        with pytest.raises(kind) as caught:
            make()
        assert expected in str(caught.value)


def as_hook_of_ddp(options: dict[str, Any], tolerance: float) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    reference = DistributedDataParallel(made(mlp), bucket_cap_mb=0.0002)
    hooked = DistributedDataParallel(made(mlp), bucket_cap_mb=0.0002)
    hooks.use_reduction(hooked, Reduction(**options))
    for step in range(3):
        for one in (reference, hooked):
            one.zero_grad()
            inputs, targets = list(batches(step + 1, rank))[-1]
            F.mse_loss(one(inputs), targets).backward()
        for one, expected in zip(hooked.parameters(), reference.parameters(), strict=True):
            scale = W if options.get("op") == "sum" else 1
            limit = tolerance * float(expected.grad.abs().max())
            torch.testing.assert_close(one.grad / scale, expected.grad, rtol=0, atol=limit)


@WORLD_SIZES
def test_reductions_as_hooks_of_ddp(pools: Pools, world_size: int) -> None:
    for options, tolerance, _ in REDUCTIONS:
        pools(world_size).run(as_hook_of_ddp, options, tolerance)


def as_hook_of_fsdp2(options: dict[str, Any], tolerance: float) -> None:
    from torch.distributed.fsdp import fully_shard  # not before 2.6; takes seconds

    rank, W = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (W,))
    reference, hooked = made(mlp), made(mlp)
    for one in (reference, hooked):
        fully_shard(one[2], mesh=mesh)
        fully_shard(one, mesh=mesh)
    hooks.use_reduction(hooked, Reduction(**options))
    for step in range(2):
        for one in (reference, hooked):
            one.zero_grad()
            inputs, targets = list(batches(step + 1, rank))[-1]
            F.mse_loss(one(inputs), targets).backward()
        for one, expected in zip(hooked.parameters(), reference.parameters(), strict=True):
            scale = W if options.get("op") == "sum" else 1
            part, wanted = one.grad.to_local(), expected.grad.to_local()
            limit = tolerance * max(1.0, float(wanted.abs().max())) if wanted.numel() else 0
            torch.testing.assert_close(part / scale, wanted, rtol=0, atol=limit)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_reductions_as_hooks_of_fsdp2(pools: Pools, world_size: int) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(getattr(fsdp, "FSDPModule", None), "set_custom_reduce_scatter"):
        pytest.skip("FSDP2 of this torch takes no such hook")
    for options, tolerance, _ in REDUCTIONS[:7]:
        pools(world_size).run(as_hook_of_fsdp2, options, tolerance)


def compiled_models(of_compiled: bool) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    model, alone = made(mlp), made(mlp)
    whole = torch.compile(model, backend="aot_eager")
    with hooks.register_data_parallel_hooks(whole if of_compiled else model, Options(**SMALL)) as handle:
        for step in range(3):
            inputs, targets = list(batches(step + 1, rank))[-1]
            F.mse_loss(whole(inputs), targets).backward()
            for other in range(W):
                inputs, targets = list(batches(step + 1, other))[-1]
                (F.mse_loss(alone(inputs), targets) / W).backward()
            for one, expected in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(one.grad, expected.grad)
        assert {name for names in handle.buckets for name in names} == set(dict(model.named_parameters()))
        if of_compiled:
            from torch._dynamo import compiled_autograd

            loss = model(inputs).sum()
            refused = pytest.raises(ArgumentError, match="backward: got a backward under compiled autograd")
            with refused, compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("of_compiled", [True, False])
def test_compiled_models(pools: Pools, of_compiled: bool) -> None:
    pools(2).run(compiled_models, of_compiled)


def every_layer_checkpointed(use_reentrant: bool) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    with hooks.register_data_parallel_hooks(model, Options(**SMALL)):
        plain = copy.deepcopy(model)
        for step in range(3):
            for one in (model, plain):
                one.zero_grad()
            given = torch.full((2, 3), float(rank + step), requires_grad=True)
            for layer in model:
                given = checkpoint(layer, given, use_reentrant=use_reentrant)
            given.square().sum().backward()
            for other in range(W):
                (plain(torch.full((2, 3), float(other + step))).square().sum() / W).backward()
            for one, expected in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one.grad, expected.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_every_layer_checkpointed(pools: Pools, use_reentrant: bool) -> None:
    pools(2).run(every_layer_checkpointed, use_reentrant)


def run_backward_against_nobody(mismatch: str) -> str:
    """Rank 1 makes another call than the hooks of rank 0 in its backward."""
    dist.init_distributed("gloo", verbose=False, timeout=20, config={"checks": {"mismatch": mismatch}})
    model = nn.Linear(3, 3)
    dist.register_data_parallel_hooks(model)
    loss = model(torch.ones(2, 3)).sum()
    with pytest.raises(CollectiveMismatchError) as raised:
        loss.backward() if dist.get_rank() == 0 else dist.barrier()
    dist.destroy_process_group()
    return str(raised.value)


@pytest.mark.parametrize("mismatch", ["lazy", "strict"])
def test_errors_of_hooks_name_the_line_of_the_program(bare_pools: Callable[[int], RankPool], mismatch: str) -> None:
    for text in bare_pools(2).run(run_backward_against_nobody, mismatch):
        assert "test_data_parallel.py:" in text
        assert "/torch/" not in text, text
