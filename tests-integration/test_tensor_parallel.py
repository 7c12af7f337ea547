"""Tensor parallelism against the same computation on one rank, in float64."""

from __future__ import annotations

import copy
import functools
import gc
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import comm_orchestrator as dist
from comm_collectives import hooks
from comm_collectives.hooks.handle import handles_of
from comm_utils.errors import ArgumentError, ArgumentTypeError, CollectiveMismatchError
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]


def regions() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(24.0 * W, dtype=torch.float64).view(4 * W, 6).sin()
    weights = [torch.full_like(whole, 1.0 + other) for other in range(W)]
    for dim in (0, 1, -1):
        own = whole if whole.shape[dim] % W == 0 else whole[:, : 6 // W * W]
        factors = [one[:, : own.shape[1]] for one in weights]
        part = own.chunk(W, dim)[rank]
        for gather, back_is_sum in (
            (hooks.gather_from_tensor_parallel_region, False),
            (hooks.gather_from_sequence_parallel_region, True),
        ):
            leaf = part.clone().requires_grad_()
            result = gather(leaf, None, dim)
            assert torch.equal(result, own)
            (result * factors[rank]).sum().backward()
            total = sum(factors) if back_is_sum else factors[rank]
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, total.chunk(W, dim)[rank])
        for scatter in (hooks.scatter_to_tensor_parallel_region, hooks.scatter_to_sequence_parallel_region):
            leaf = own.clone().requires_grad_()
            result = scatter(leaf, None, dim)
            assert torch.equal(result, part)
            assert result.untyped_storage().nbytes() == result.nbytes
            assert torch.equal(scatter(leaf, None, dim).mul_(2), 2 * part)  # memory of its own
            (result * (rank + 1)).sum().backward()
            parts = [torch.full_like(one, 1.0 + other) for other, one in enumerate(own.chunk(W, dim))]
            expected = torch.cat(parts, dim)
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, expected)
        leaf = (own * (rank + 1)).requires_grad_()
        result = hooks.reduce_scatter_to_sequence_parallel_region(leaf, None, dim)
        assert torch.allclose(result, part * (W * (W + 1) / 2))
        (result * (rank + 1)).sum().backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, expected)
    for read in (
        hooks.reduce_from_tensor_parallel_region,
        hooks.gather_from_tensor_parallel_region,
        hooks.reduce_scatter_to_sequence_parallel_region,
    ):
        with torch.no_grad():
            given = whole.clone()
            read(given).mul_(5)
            assert torch.equal(given, whole)
    leaf = whole.clone().requires_grad_()
    result = hooks.copy_to_tensor_parallel_region(leaf)
    assert torch.equal(result, whole)
    (result * (rank + 1)).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full_like(whole, W * (W + 1) / 2))
    leaf = torch.tensor(rank + 1.0, dtype=torch.float64, requires_grad=True)
    result = hooks.reduce_from_tensor_parallel_region(leaf * leaf)
    assert result.item() == sum((other + 1) ** 2 for other in range(W))
    (gradient,) = torch.autograd.grad(result * result, leaf, create_graph=True)  # gradients of gradients
    gradient.backward()
    assert leaf.grad is not None
    # d/dx of (4 s x), where each rank's s holds its own x alone for its gradient, summed over the ranks' graphs
    assert leaf.grad.item() > 0
    small = torch.ones(3, W * 2 + 1, requires_grad=True)
    if W > 1:
        with pytest.raises(ArgumentError, match=rf"scatter_to_tensor_parallel_region: tensor: got {2 * W + 1} along"):
            hooks.scatter_to_tensor_parallel_region(small)
    with pytest.raises(ArgumentError, match=r"gather_from_tensor_parallel_region: dim: got 2"):
        hooks.gather_from_tensor_parallel_region(small, None, 2)
    with pytest.raises(ArgumentTypeError, match="copy_to_tensor_parallel_region: tensor: got str"):
        hooks.copy_to_tensor_parallel_region("tensor")  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_regions(pools: Pools, world_size: int) -> None:
    pools(world_size).run(regions)


def cross_entropy() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    for smoothing in (0.0, 0.1):
        for reduction in ("mean", "sum", "none"):
            whole = (torch.randn(5, 4, 6 * W, dtype=torch.float64) * 100).requires_grad_()
            targets = torch.randint(0, 6 * W, (5, 4))
            targets[0, 1] = targets[3, 3] = -100
            part = whole.detach().chunk(W, -1)[rank].clone().requires_grad_()
            loss = hooks.vocabulary_parallel_cross_entropy(
                part, targets, label_smoothing=smoothing, reduction=reduction
            )
            expected = F.cross_entropy(
                whole.flatten(0, 1), targets.flatten(), label_smoothing=smoothing, reduction=reduction
            )
            torch.testing.assert_close(loss.flatten(), expected.flatten(), rtol=1e-12, atol=1e-12)
            factor = torch.arange(1.0, 21.0, dtype=torch.float64)[: loss.numel()]
            (loss.flatten() * factor).sum().backward()
            (expected.flatten() * factor).sum().backward()
            assert whole.grad is not None
            torch.testing.assert_close(part.grad, whole.grad.chunk(W, -1)[rank], rtol=1e-10, atol=1e-12)
    huge = torch.full((2, 3), 60000.0, dtype=torch.float16)
    loss = hooks.vocabulary_parallel_cross_entropy(huge, torch.zeros(2, dtype=torch.int64))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.tensor(3.0 * W).log())
    with pytest.raises(ArgumentError, match=rf"targets: got {3 * W}; expected 0 to {3 * W - 1}"):
        hooks.vocabulary_parallel_cross_entropy(huge, torch.tensor([0, 3 * W]))
    with pytest.raises(ArgumentError, match="targets: got shape"):
        hooks.vocabulary_parallel_cross_entropy(huge, torch.tensor([0]))
    with pytest.raises(ArgumentError, match="reduction: got 'most'"):
        hooks.vocabulary_parallel_cross_entropy(huge, torch.tensor([0, 1]), reduction="most")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_cross_entropy_is_that_of_gathered_logits(pools: Pools, world_size: int) -> None:
    pools(world_size).run(cross_entropy)


def broadcasting() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    batch = {"text": torch.arange(12).view(3, 4), "mask": torch.ones(2, dtype=torch.int64), "other": torch.ones(1)}
    found = hooks.broadcast_data(["mask", "text"], batch if rank == 0 else None, torch.int64)
    assert list(found) == ["mask", "text"]
    assert torch.equal(found["text"], batch["text"])
    assert torch.equal(found["mask"], batch["mask"])
    assert hooks.broadcast_data([], {} if rank == 0 else None, torch.int64) == {}
    with pytest.raises(ArgumentError, match=r"(rank 0 refused its arguments: )?.*data\['other'\]: got torch.float32"):
        hooks.broadcast_data(["other"], batch if rank == 0 else None, torch.int64)
    with pytest.raises(ArgumentError, match="has no 'labels'"):
        hooks.broadcast_data(["labels"], batch if rank == 0 else None, torch.int64)
    if W > 1:
        with pytest.raises(CollectiveMismatchError, match=r"keys: got \['mask'\] on rank 1 and \['text'\] on rank 0"):
            hooks.broadcast_data(["mask"] if rank == 1 else ["text"], batch if rank == 0 else None, torch.int64)


@pytest.mark.parametrize("world_size", [1, 3])
def test_broadcast_data(pools: Pools, world_size: int) -> None:
    pools(world_size).run(broadcasting)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.qkv = nn.Linear(12, 36)
        self.out = nn.Linear(12, 12)
        self.norm2 = nn.LayerNorm(12)
        self.up = nn.Linear(12, 24, bias=False)
        self.down = nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        heads = [one.unflatten(-1, (-1, 2)).transpose(1, 2) for one in (q, k, v)]
        attention = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attention)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(24, 12, padding_idx=13)
        self.positions = nn.Embedding(12, 12)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 24, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(12).expand_as(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN: dict[str, Any] = {
    "tokens": "vocabulary",
    "head": "vocabulary",
    "blocks.*.qkv": ("column", 3),
    "blocks.*.up": "column",
    "blocks.*.out": "row",
    "blocks.*.down": "row",
}
SEQUENCES = {"positions": "sequence_scatter", "*norm": "sequence", "*norm2": "sequence"}


def plan_of_a_model(sequence_dim: int | None, is_compiled: bool) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    single = Model().double()
    parallel = copy.deepcopy(single)
    before = {name: one.clone() for name, one in parallel.state_dict().items()}
    plan = PLAN if sequence_dim is None else {**PLAN, **SEQUENCES}
    alive = parallel(torch.zeros(2, 12, dtype=torch.int64)).sum()  # keeps a graph of whole parameters
    handle = hooks.register_model_parallel_hooks(parallel, None, plan, sequence_dim=sequence_dim)
    assert parallel.blocks[0].qkv.weight.shape == (36 // W, 12)
    assert parallel.blocks[0].down.in_features == 24 // W
    handle.remove()
    for name, one in parallel.state_dict().items():
        assert torch.equal(one, before[name]), name
    assert parallel.blocks[0].down.in_features == 24
    for module in parallel.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
    handle = hooks.register_model_parallel_hooks(parallel, None, plan, sequence_dim=sequence_dim)
    with pytest.raises(ArgumentError, match=r"has the hooks of register_model_parallel_hooks\(\)"):
        hooks.register_model_parallel_hooks(parallel, None, plan)
    run = torch.compile(parallel, backend="eager") if is_compiled else parallel
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (single, parallel)]
    for step in range(3):
        ids = torch.randint(0, 24, (2, 12), generator=torch.Generator().manual_seed(step))
        targets = ids.roll(-1, 1)
        for _ in range(2):  # gradients are accumulated
            expected = F.cross_entropy(single(ids).flatten(0, 1), targets.flatten())
            expected.backward()
            loss = hooks.vocabulary_parallel_cross_entropy(run(ids), targets)
            loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = handle.full_state_dict()
    handle.load_full_state_dict(full)
    handle.remove()
    for name, one in single.state_dict().items():
        torch.testing.assert_close(full[name], one, rtol=1e-10, atol=1e-12, msg=name)
        assert torch.equal(full[name], parallel.state_dict()[name])
    assert parallel.head.weight is parallel.tokens.weight
    assert rank >= 0
    assert alive.grad_fn is not None


@pytest.mark.parametrize("sequence_dim", [None, 1])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_model_by_plan_trains_as_on_one_rank(pools: Pools, world_size: int, sequence_dim: int | None) -> None:
    pools(world_size).run(plan_of_a_model, sequence_dim, False)


def test_a_compiled_model_trains_alike(pools: Pools) -> None:
    pools(2).run(plan_of_a_model, 1, True)


def small_model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)).double()


SMALL_PLAN = {"0": "vocabulary", "2": "column", "3": "row"}


def copies() -> None:
    single, parallel = small_model(), small_model()
    ids = torch.arange(8).view(2, 4)
    hooks.register_model_parallel_hooks(parallel, None, SMALL_PLAN)
    gc.collect()
    with pytest.raises(ArgumentError, match=r"'0.weight' has the hooks of register_model_parallel_hooks\(\)"):
        hooks.register_model_parallel_hooks(parallel, None, SMALL_PLAN)
    for copied in (copy.deepcopy(parallel), copy.deepcopy(copy.deepcopy(parallel))):
        doubled = copy.deepcopy(single)
        with torch.no_grad():
            for one in (*copied.parameters(), *doubled.parameters()):
                one.mul_(2)
        torch.testing.assert_close(copied(ids), doubled(ids), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(parallel(ids), single(ids), rtol=1e-12, atol=1e-12)
    with pytest.raises(ArgumentError, match=r"^pickle: .* the hooks of register_model_parallel_hooks\(\)"):
        torch.save(parallel, io.BytesIO())
    (handle,) = handles_of(parallel)
    handle.remove()
    torch.save(parallel, io.BytesIO())
    assert all(map(torch.equal, parallel.parameters(), single.parameters()))
    torch.testing.assert_close(copied(ids), doubled(ids), rtol=1e-12, atol=1e-12)


def changes_with_sequence_parallelism() -> None:
    single, parallel = small_model(), small_model()
    ids = torch.arange(8).view(2, 4)
    plan = {**SMALL_PLAN, "1": "sequence"}
    for name, layer in (("1.weight", parallel[1]), ("3.bias", parallel[3])):
        for one in layer.parameters():
            one.requires_grad_(False)
        handle = hooks.register_model_parallel_hooks(parallel, None, plan, sequence_dim=1)
        parallel(ids)
        for one in layer.parameters():
            one.requires_grad_(True)
        with pytest.raises(ArgumentError, match=rf"forward: parameter '{name}' requires a gradient, which it did not"):
            parallel(ids)
        with torch.no_grad():
            parallel(ids)
        handle.remove()
    handle = hooks.register_model_parallel_hooks(parallel, None, plan, sequence_dim=1)
    copied = copy.deepcopy(parallel)
    with pytest.raises(ArgumentError, match=r"forward: got called with gradients on a copy of a model with sequence"):
        copied(ids)
    with torch.no_grad():
        assert torch.equal(copied(ids), parallel(ids))
    hooks.gather_from_sequence_parallel_region(parallel(ids), None, 1, False).square().sum().backward()
    single(ids).square().sum().backward()
    for place in (1, 3):
        torch.testing.assert_close(parallel[place].bias.grad, single[place].bias.grad, rtol=1e-12, atol=1e-12)
    handle.remove()


def test_copies_and_changes(pools: Pools) -> None:
    pools(2).run(copies)
    pools(2).run(changes_with_sequence_parallelism)


class NormedHeads(nn.Module):
    """Attention that normalizes the queries and keys of each head, as Qwen3 and Gemma 3 do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(4), nn.RMSNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        q, k, v = (one(normed).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.q, self.k, self.v))
        attention = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return x + self.out(attention.transpose(1, 2).flatten(2))


NORMED_PLAN = {"q": "column", "k": "column", "v": "column", "out": "row"}


def step_of(model: nn.Module, clip: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
    """Train for one step, and return the norm of the gradients where they are clipped."""
    x = torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    F.mse_loss(model(x), x.roll(1, 1)).backward()
    norm = None if clip is None else clip()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return norm


def norms_of_heads() -> None:
    torch.manual_seed(4)
    single = NormedHeads().double()
    parallel = copy.deepcopy(single)
    handle = hooks.register_model_parallel_hooks(parallel, None, {**NORMED_PLAN, "?_norm": "summed"})
    for model in (single, parallel):
        step_of(model)
    full = handle.full_state_dict()
    for name, one in single.state_dict().items():
        torch.testing.assert_close(full[name], one, rtol=1e-10, atol=1e-12, msg=name)
    with pytest.raises(ArgumentError, match="copy of a model with sequence parallelism or the style 'summed'"):
        copy.deepcopy(parallel)(torch.ones(1, 1, 16, dtype=torch.float64))
    handle.remove()
    summed_scatter = {"norm": "sequence", "?_norm": "summed"}
    x = torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for model in (single, parallel):
        model.zero_grad()
    handle = hooks.register_model_parallel_hooks(parallel, None, {**NORMED_PLAN, **summed_scatter}, sequence_dim=1)
    part = hooks.scatter_to_sequence_parallel_region(x, None, 1)
    joined = hooks.gather_from_sequence_parallel_region(parallel(part), None, 1, False)
    for result in (single(x), joined):
        result.square().mean().backward()
    for name in ("norm", "q_norm", "k_norm"):
        mine, its = parallel.get_submodule(name), single.get_submodule(name)
        torch.testing.assert_close(mine.weight.grad, its.weight.grad, rtol=1e-9, atol=1e-13, msg=name)
    handle.remove()


def drifting_norms_of_heads() -> None:
    torch.manual_seed(4)
    model = NormedHeads().double()
    handle = hooks.register_model_parallel_hooks(model, None, NORMED_PLAN)
    handle.full_state_dict()
    step_of(model)
    for call in (handle.full_state_dict, handle.remove):
        with pytest.raises(CollectiveMismatchError) as caught:
            call()
        assert str(caught.value).startswith(
            f"{call.__name__}: parameter 'q_norm.weight' is not divided, but differs on"
        )
        assert "give 'q_norm' the style 'summed' in the plan" in str(caught.value)
    assert model.q.weight.shape == (16, 16)  # removed
    handle.remove()
    with torch.no_grad():  # as kernels that add in another order leave it
        model.q_norm.weight.fill_(1).mul_(1 + 1e-14 * dist.get_rank())
        model.k_norm.weight.fill_(float("nan"))
    hooks.register_model_parallel_hooks(model, None, NORMED_PLAN).remove()


def test_norms_of_heads_need_sums(pools: Pools) -> None:
    pools(2).run(norms_of_heads)
    pools(2).run(drifting_norms_of_heads)


def clipped() -> None:
    torch.manual_seed(4)
    single = NormedHeads().double()
    parallel = copy.deepcopy(single)
    handle = hooks.register_model_parallel_hooks(parallel, None, {**NORMED_PLAN, "?_norm": "summed"})
    for order in (2.0, math.inf, 1.0):
        torch.testing.assert_close(
            step_of(parallel, functools.partial(handle.clip_grad_norm, 0.01, order)),
            step_of(single, functools.partial(nn.utils.clip_grad_norm_, single.parameters(), 0.01, order)),
        )
    full = handle.full_state_dict()
    for name, one in single.state_dict().items():
        torch.testing.assert_close(full[name], one, rtol=1e-10, atol=1e-12, msg=name)
    before = [one.grad.clone() for one in parallel.parameters() if one.grad is not None]
    assert torch.equal(handle.clip_grad_norm(math.inf), handle.clip_grad_norm(math.inf))
    for call, clip in (
        ("clip_grad_norm_", lambda: nn.utils.clip_grad_norm_(parallel.parameters(), 1e-3)),
        ("clip_grad_norm_", lambda: nn.utils.clip_grad_norm_(parallel.q.weight, 1e-3)),
        ("get_total_norm", lambda: nn.utils.get_total_norm([one.grad for one in parallel.parameters()])),
    ):
        with pytest.raises(ArgumentError) as caught:
            clip()
        text = str(caught.value)
        assert text.startswith(f"torch.nn.utils.{call}: got ")
        assert "parameter 'q.weight' of a model with the hooks of register_model_parallel_hooks(), whose" in text
        assert "call handle.clip_grad_norm(" in text
    assert all(map(torch.equal, before, [one.grad for one in parallel.parameters()]))
    # What is the same on every rank, element by element, or of parameters that each rank holds whole.
    norm = handle.clip_grad_norm(math.inf)
    nn.utils.clip_grads_with_norm_(parallel.parameters(), norm.item() / 2, norm)
    torch.testing.assert_close(handle.clip_grad_norm(math.inf), norm / 2, rtol=0.02, atol=0)
    nn.utils.clip_grad_value_(parallel.parameters(), 1e-6)
    nn.utils.clip_grad_norm_(parallel.norm.parameters(), 1e-3)
    handle.remove()
    with pytest.raises(ArgumentError, match=r"clip_grad_norm: got called after remove\(\)"):
        handle.clip_grad_norm(1.0)
    step_of(parallel, lambda: nn.utils.clip_grad_norm_(parallel.parameters(), 1.0))


def test_norms_are_those_of_the_whole_model(pools: Pools) -> None:
    pools(2).run(clipped)


def with_data_parallel() -> None:
    groups = hooks.ParallelGroups.from_sizes(data=2, tensor=2)
    torch.manual_seed(1)
    single = Model().double()
    parallel = copy.deepcopy(single)
    plan = {**PLAN, **SEQUENCES}
    ids = torch.randint(0, 24, (4, 12), generator=torch.Generator().manual_seed(0))
    mine = ids.chunk(2)[groups.data.rank]
    layers = hooks.register_model_parallel_hooks(parallel, groups, plan, sequence_dim=1)
    reduction = hooks.register_data_parallel_hooks(parallel, group=groups.data.group)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (single, parallel)]
    for _ in range(3):
        F.cross_entropy(single(ids).flatten(0, 1), ids.flatten()).backward()
        hooks.vocabulary_parallel_cross_entropy(parallel(mine), mine, groups.tensor.group).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(ArgumentError, match=r"register_data_parallel_hooks\(\) were registered .* later; remove these"):
        layers.remove()
    reduction.remove()
    layers.remove()
    for name, one in single.state_dict().items():
        torch.testing.assert_close(parallel.state_dict()[name], one, rtol=1e-10, atol=1e-12, msg=name)


def test_with_data_parallel_hooks(pools: Pools) -> None:
    pools(4).run(with_data_parallel)


def under_autocast() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    with (
        hooks.register_model_parallel_hooks(model, None, {"0": "column", "1": "row"}),
        torch.autocast("cpu", torch.bfloat16),
    ):
        assert model(torch.ones(1, 4)).dtype == torch.bfloat16


def test_row_layers_keep_the_dtype_of_autocast(pools: Pools) -> None:
    pools(2).run(under_autocast)


def groups_with_other_parts() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    own = [dist.new_group([one]) for one in range(2)][dist.get_rank()]
    with hooks.register_model_parallel_hooks(model, None, {"0": "column", "2": "row"}):
        before = [one.detach().clone() for one in model.parameters()]
        for register in (
            hooks.register_data_parallel_hooks,
            lambda module: hooks.register_sharded_hooks(module, 1),
            lambda module: hooks.register_sharded_hooks(module, 3),
        ):
            for module, name in (
                (model, "0.weight"),
                (model[2], "weight"),
            ):  # the second one does not require gradients
                with pytest.raises(
                    ArgumentError,
                    match=rf"parameter '{name}' is divided over ranks \[0, 1\] .*group=groups\.data\.group",
                ):
                    register(module)
        for one, earlier in zip(model.parameters(), before, strict=True):
            assert torch.equal(one, earlier)
        divided = [model[0].weight, model[0].bias, model[2].weight]
        hooks.register_data_parallel_hooks(model, ignored_parameters=divided).remove()
        hooks.register_data_parallel_hooks(model, group=own).remove()
        hooks.register_sharded_hooks(model, 1, own).remove()
    hooks.register_data_parallel_hooks(model).remove()


def test_replicas_of_different_parts_are_refused(pools: Pools) -> None:
    pools(2).run(groups_with_other_parts)


def called_by_keyword() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    given = torch.rand(2, 4)
    expected = model(given)
    with hooks.register_model_parallel_hooks(model, None, {"0": "column_gathered"}):
        torch.testing.assert_close(model[0](input=given), expected)
        with pytest.raises(TypeError, match="input"):
            model[0]()


def test_a_column_layer_takes_its_input_by_name(pools: Pools) -> None:
    pools(2).run(called_by_keyword)


def ids_of_no_row() -> None:
    model = small_model()
    with hooks.register_model_parallel_hooks(model, None, SMALL_PLAN):
        assert model(torch.empty(0, dtype=torch.int64)).shape == (0, 4)
        for wrong in (-1, 8):
            with pytest.raises(ArgumentError, match=f"embedding: input: got the id {wrong}, expected 0 to 7"):
                model(torch.tensor([0, wrong, 7]))


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_id_of_no_row_is_refused(pools: Pools, world_size: int) -> None:
    pools(world_size).run(ids_of_no_row)


def whole_weights_with_a_default_compression() -> None:
    single, parallel = small_model().float(), small_model().float()
    dist.set_compression("int4")
    try:
        handle = hooks.register_model_parallel_hooks(parallel, None, SMALL_PLAN)
        full = handle.full_state_dict()
        handle.remove()
    finally:
        dist.set_compression(None)
    assert all(torch.equal(full[name], one) for name, one in single.state_dict().items())
    assert all(map(torch.equal, parallel.parameters(), single.parameters()))


def test_whole_weights_are_not_compressed(pools: Pools) -> None:
    pools(2).run(whole_weights_with_a_default_compression)


def whole_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with hooks.register_model_parallel_hooks(model, None, {"0": "column"}):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="copy_to_tensor_parallel_region"):
            compiled(torch.ones(2, 4))


def test_a_whole_graph_is_refused_with_the_name_of_the_call(pools: Pools) -> None:
    pools(2).run(whole_graph)


def wrong_plans() -> list[str]:
    W = dist.get_world_size()
    found = []
    model = Model()
    other = nn.Sequential(nn.Linear(3 * W + 1, 3 * W + 1), nn.Conv1d(1, 1, 1), nn.Embedding(4 * W, 2, max_norm=1.0))
    for module, plan in [
        (model, {}),
        (model, {"blocks.*.nothing": "column"}),
        (model, {"blocks.0.up": "diagonal"}),
        (model, {"blocks.0.up": "column", "*.up": "column"}),
        (model, {"head": "vocabulary"}),
        (model, {"norm": "sequence"}),
        (model, {"tokens": "vocabulary", "head": "row"}),
        (model, {"blocks.0": "summed", "blocks.0.up": "column"}),
        (other, {"0": "column"}),
        (other, {"1": "column"}),
        (other, {"2": "vocabulary"}),
    ]:
        with pytest.raises(ArgumentError) as caught:
            hooks.register_model_parallel_hooks(module, None, plan)
        found.append(str(caught.value))
    with pytest.raises(CollectiveMismatchError) as mismatch:
        hooks.register_model_parallel_hooks(model, None, {"*.up": "column" if dist.get_rank() else "column_gathered"})
    found.append(str(mismatch.value))
    with pytest.raises(ArgumentError) as caught:
        hooks.register_model_parallel_hooks(model, None, {"*.up": "column"} if dist.get_rank() else {"up": "column"})
    found.append(str(caught.value))
    return found


def test_wrong_plans_name_the_module(pools: Pools) -> None:
    expected = [
        "plan: got {}",
        "plan: pattern 'blocks.*.nothing' matches no module",
        "plan['blocks.0.up']: got 'diagonal'",
        "plan: module 'blocks.0.up' matches 'blocks.0.up' and '*.up'",
        "plan: tokens.weight is 'head.weight', which is divided; give 'tokens' a style as well",
        "plan['norm']: got 'sequence' without sequence parallelism; pass sequence_dim",
        "plan: 'head.weight' is also 'tokens.weight', which is divided along dimension 0",
        "plan: module 'blocks.0' is 'summed' and has 'blocks.0.up.weight', which is divided",
        "parameter '0.weight' has 7 along dimension 0",
        "plan: module '1' is a Conv1d; expected nn.Linear",
        "plan: module '2' has max_norm",
        "plan: got [('blocks.0.up', 'column', 1)",
        "matches no module",
    ]
    for found in pools(2).run(wrong_plans):
        for text, part in zip(found, expected, strict=True):
            assert text.startswith("register_model_parallel_hooks: ")
            assert part in text, text
