"""Hooks with compression: nothing but gradients is rounded, and what encodings lose arrives later."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import comm_orchestrator as dist
from comm_collectives.hooks import (
    DataParallelOptions,
    GradientReduction,
    Handle,
    partition,
    register_data_parallel_hooks,
    register_sharded_hooks,
    unpartition,
    use_reduction,
    vocabulary_parallel_cross_entropy,
)
from comm_collectives.hooks.sparse_gradients import reduce_rows
from comm_utils.errors import ArgumentError, CollectiveMismatchError
from comm_utils.log import logger
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]


# --- what a default compression leaves alone


def small_steps(stage: int, codec: str) -> tuple[float, float]:
    """Return how far parameters of 1 moved at least and at most in 50 steps of 1e-4."""
    model = nn.Linear(64, 64, bias=False)
    nn.init.ones_(model.weight)
    dist.set_compression(codec)
    try:
        handle = register_sharded_hooks(model, stage)
        assert handle is not None
        optimizer = torch.optim.SGD(handle.parameter_groups(), lr=1e-4)
        handle.attach(optimizer)
        for _ in range(50):
            optimizer.zero_grad()
            model(torch.eye(64)).sum().backward()
            optimizer.step()
        handle.remove()
    finally:
        dist.set_compression(None)
    moved = 1 - model.weight.detach()
    return float(moved.min()), float(moved.max())


@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_default_compression_keeps_small_steps_of_the_optimizer(pools: Pools, stage: int, codec: str) -> None:
    for least, most in pools(2).run(small_steps, stage, codec):
        assert least == pytest.approx(5e-3, rel=0.02)
        assert most == pytest.approx(5e-3, rel=0.02)


def losses_and_norms() -> tuple[list[float], list[float]]:
    """Return a loss and a norm without and with a default compression."""
    rank, W = dist.get_rank(), dist.get_world_size()
    logits = torch.randn(4, 64 * W, generator=torch.Generator().manual_seed(0))[:, rank * 64 : (rank + 1) * 64]
    targets = torch.arange(4) * 16 * W
    losses, norms = [], []
    for codec in (None, "int4"):
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        dist.set_compression(codec)
        try:
            losses.append(float(vocabulary_parallel_cross_entropy(logits.contiguous(), targets)))
            with_norm = register_sharded_hooks(model, 2, reduction=GradientReduction(compression="none"))
            assert with_norm is not None
            torch.optim.SGD(with_norm.parameter_groups(), lr=1.0)
            model(torch.ones(1, 16)).square().sum().backward()
            norms.append(float(with_norm.clip_grad_norm(1e9)))
            with_norm.remove()
        finally:
            dist.set_compression(None)
    return losses, norms


def test_a_default_compression_leaves_losses_and_norms_alone(pools: Pools) -> None:
    for losses, norms in pools(2).run(losses_and_norms):
        assert losses[0] == losses[1]
        assert norms[0] == norms[1]


def gathered_as_they_are() -> list[bool]:
    """Return whether parts of a tensor, and rows of a sparse gradient, are those of every rank to the last bit."""
    whole = torch.linspace(0, 1, 50_000)
    part = partition(whole)
    assert part is not None
    embedding = nn.Embedding(1000, 64, sparse=True)
    rows = torch.linspace(0, 1, 64_000).view(1000, 64)
    gradient = torch.sparse_coo_tensor(torch.arange(1000).unsqueeze(0), rows, (1000, 64))
    dist.set_compression("int8")
    try:
        returned = unpartition(part, whole.shape)
        (summed,) = reduce_rows([gradient], [embedding.weight], GradientReduction("sum"))
    finally:
        dist.set_compression(None)
    assert returned is not None
    assert summed is not None
    return [torch.equal(returned, whole), torch.equal(summed.to_dense(), rows * dist.get_world_size())]


def test_a_default_compression_leaves_parts_and_sparse_rows_alone(pools: Pools) -> None:
    assert pools(2).run(gathered_as_they_are) == [[True, True]] * 2


# --- error feedback


class Product(nn.Module):
    """A parameter whose gradient is given."""

    def __init__(self, gradient: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.gradient = nn.Parameter(torch.zeros_like(gradient)), gradient

    def forward(self, total: torch.Tensor) -> torch.Tensor:
        return total + (self.weight * self.gradient).sum()


def make_products() -> nn.Sequential:
    """Return a model with six parameters of one size, and gradients of three magnitudes."""
    draw = torch.Generator().manual_seed(0)
    return nn.Sequential(*(Product(torch.randn(256, generator=draw) * 10.0 ** (place % 3)) for place in range(6)))


def with_hooks(model: nn.Sequential, stage: int, compression: dist.Compression) -> tuple[Handle, torch.optim.Optimizer]:
    """Register hooks with buckets of one parameter each; stage 0 stands for data-parallel ones."""
    reduction, size_bytes = GradientReduction(compression=compression), 1024
    if not stage:
        handle = register_data_parallel_hooks(model, DataParallelOptions(reduction, size_bytes, size_bytes))
        assert handle is not None
        return handle, torch.optim.SGD(model.parameters(), lr=1.0)
    sharded = register_sharded_hooks(model, stage, bucket_size_bytes=size_bytes, reduction=reduction)
    assert sharded is not None
    optimizer = torch.optim.SGD(sharded.parameter_groups(), lr=1.0)
    sharded.attach(optimizer)
    return sharded, optimizer


def mean_updates(stage: int, method: str, steps: int, name: str = "") -> list[float]:
    """Return the relative error of the mean update of each parameter."""
    model = make_products()
    compression = dist.Compression(method, error_feedback=True)
    handle, optimizer = with_hooks(model, stage, compression.of(name) if name else compression)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.zeros(())).backward()
        optimizer.step()
    handle.remove()
    pairs = [(one.weight.detach() / steps, one.gradient) for one in model]
    return [float((one + gradient).norm() / gradient.norm()) for one, gradient in pairs]


@pytest.mark.parametrize(("method", "steps", "limit"), [("int4", 40, 0.02), ("topk", 100, 0.35), ("powersgd", 40, 0.1)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hooks_make_up_for_what_each_bucket_lost(
    pools: Pools, stage: int, method: str, steps: int, limit: float
) -> None:
    for errors in pools(2).run(mean_updates, stage, method, steps):
        assert max(errors) < limit


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_name_serves_all_buckets_of_a_model(pools: Pools, stage: int) -> None:
    for errors in pools(2).run(mean_updates, stage, "int4", 40, "gradients"):
        assert max(errors) < 0.02


def mean_of_ddp(name: str) -> tuple[float, list[str]]:
    """Return the largest relative error of a mean gradient of DDP, and the names of all states."""
    model = make_products()
    compression = dist.Compression("int4", error_feedback=True)
    hooked = DistributedDataParallel(model, bucket_cap_mb=1024 / 2**20)
    use_reduction(hooked, GradientReduction(compression=compression.of(name)))
    totals = [torch.zeros(256) for _ in model]
    for _ in range(40):
        hooked.zero_grad()
        hooked(torch.zeros(())).backward()
        for one, total in zip(model, totals, strict=True):
            total += one.weight.grad
    errors = [float((t / 40 - m.gradient).norm() / m.gradient.norm()) for m, t in zip(model, totals, strict=True)]
    return max(errors), list(compression.state_dict()["tensors"])


def test_a_name_serves_all_buckets_of_ddp(pools: Pools) -> None:
    for error, names in pools(2).run(mean_of_ddp, "gradients"):
        assert error < 0.03
        assert len(names) > 2
        assert all(one.startswith("gradients.") for one in names)


def mean_of_fsdp2() -> tuple[float, list[str]]:
    """Return the largest relative error of a mean gradient of FSDP2, and the names of all states."""
    from torch.distributed.fsdp import fully_shard  # not before 2.6; takes seconds

    model = make_products()
    compression = dist.Compression("int4", error_feedback=True)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for one in (*model, model):
        fully_shard(one, mesh=mesh)
    use_reduction(model, GradientReduction(compression=compression.of("gradients")))
    totals = [torch.zeros(256) for _ in model]
    for _ in range(40):
        model.zero_grad()
        model(torch.zeros(1)).sum().backward()
        for one, total in zip(model, totals, strict=True):
            total += one.weight.grad.full_tensor()
    errors = [float((t / 40 - m.gradient).norm() / m.gradient.norm()) for m, t in zip(model, totals, strict=True)]
    return max(errors), list(compression.state_dict()["tensors"])


@pytest.mark.slow
def test_a_name_serves_all_modules_of_fsdp2(pools: Pools) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(getattr(fsdp, "FSDPModule", None), "set_custom_reduce_scatter"):
        pytest.skip("FSDP2 of this torch takes no such hook")
    for error, names in pools(2).run(mean_of_fsdp2):
        assert error < 0.03
        assert names == [f"gradients.{place}.256" for place in reversed(range(6))]


def test_a_default_has_no_name(pools: Pools) -> None:
    pools(1).run(refuse_a_named_default)


def refuse_a_named_default() -> None:
    with pytest.raises(ArgumentError, match="set_compression: compression: got one with the name 'w'"):
        dist.set_compression(dist.Compression("int4", error_feedback=True).of("w"))


# --- between the gradients


def make_small_layers() -> nn.Sequential:
    """Return a model whose parameters leave room between them in a bucket."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))


def gradients_by_step(factors: list[float], **options: Any) -> list[torch.Tensor]:
    """Return all gradients of each backward as one tensor; the loss of each is multiplied by its factor."""
    model, found = make_small_layers(), []
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    handle = register_data_parallel_hooks(model, DataParallelOptions(GradientReduction(**options)))
    assert handle is not None
    with handle:
        for factor in factors:
            model.zero_grad()
            (model(inputs).square().mean() * factor).backward()
            found.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]))
    return found


def test_a_gradient_that_is_no_number_spoils_one_step(pools: Pools) -> None:
    for first, second, spoiled, *later in pools(2).run(gradients_by_step, [1, 1, math.nan, 1, 1], compression="int8"):
        assert not spoiled.isfinite().any()
        assert all(torch.equal(one, first) for one in (second, *later))


def lossy_sums(method: str) -> list[float]:
    found = gradients_by_step([1.0] * 60, op="sum", compression=dist.Compression(method, error_feedback=True))
    return [float(one.abs().max()) for one in found]


@pytest.mark.parametrize("method", ["onebit", "powersgd"])
def test_sums_do_not_add_up_what_lies_between_gradients(pools: Pools, method: str) -> None:
    for largest in pools(2).run(lossy_sums, method):
        assert max(largest) < 20 * largest[0]


# --- saving


def interrupted(stage: int, is_interrupted: bool) -> list[torch.Tensor]:
    """Return the parameters after eight steps; after four, hooks and compression may be made anew."""
    model, compression = make_products(), dist.Compression("onebit")
    handle, optimizer = with_hooks(model, stage, compression.of("gradients"))
    for step in range(8):
        if step == 4 and is_interrupted:
            saved = compression.state_dict()
            assert list(saved["tensors"]) == [f"gradients.{place}.weight" for place in reversed(range(6))]
            handle.remove()
            compression = dist.Compression("onebit")
            compression.load_state_dict(saved)
            handle, optimizer = with_hooks(model, stage, compression.of("gradients"))
        optimizer.zero_grad()
        model(torch.zeros(1)).sum().backward()
        optimizer.step()
    handle.remove()
    return [one.detach().clone() for one in model.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_hooks_lost_can_be_saved(pools: Pools, stage: int) -> None:
    whole, parts = (pools(2).run(interrupted, stage, is_interrupted) for is_interrupted in (False, True))
    for expected, got in zip(whole, parts, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))


ODD = torch.linspace(-1, 2, 257)


def steps_from(
    states: list[Any] | None, weight: torch.Tensor, stage: int, method: str
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the state and the parameter after three steps that begin with these."""
    compression, model = dist.Compression(method), nn.Sequential(Product(ODD))
    if states is not None:
        compression.load_state_dict(states[dist.get_rank()])
    model[0].weight.data.copy_(weight)
    handle, optimizer = with_hooks(model, stage, compression.of("gradients"))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.zeros(())).backward()
        optimizer.step()
    handle.remove()
    return compression.state_dict(), model[0].weight.detach().clone()


@pytest.mark.parametrize("method", ["onebit", "powersgd"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_hooks_lost_moves_to_numbers_of_ranks_that_pad_otherwise(pools: Pools, stage: int, method: str) -> None:
    states, weight = None, torch.zeros_like(ODD)
    for steps, world_size in ((3, 2), (6, 3), (9, 1), (12, 2)):
        if states is not None:
            states = dist.Compression.reshard(dist.Compression.reshard(states, 4), world_size)
        found = pools(world_size).run(steps_from, states, weight, stage, method)
        states, weight = [state for state, _ in found], found[0][1]
        lacking = dist.Compression.reshard(states, 1)[0]["tensors"]["gradients.0.weight"]["local"]
        assert lacking.shape == ODD.shape
        torch.testing.assert_close(weight, lacking - steps * ODD, rtol=0, atol=1e-4)


def twins(stage: int) -> None:
    compression = dist.Compression("int4", error_feedback=True)
    first, second = make_products(), make_products()
    handle, _ = with_hooks(first, stage, compression.of("critic"))
    message = r"'critic\.[05]\.weight' is that of the hooks of another model; .* another name than 'critic'"
    with pytest.raises(ArgumentError, match=message):
        with_hooks(second, stage, compression.of("critic"))
    other, _ = with_hooks(second, stage, compression.of("other critic"))
    for model in (first, second):
        model(torch.zeros(())).backward()
    for one in (handle, other):
        one.remove()
    again, _ = with_hooks(second, stage, compression.of("critic"))
    again.remove()


@pytest.mark.parametrize("stage", [0, 2])
def test_models_with_the_same_names_need_names_of_their_own(pools: Pools, stage: int) -> None:
    pools(2).run(twins, stage)


def twins_in_ddp() -> None:
    compression = dist.Compression("int4", error_feedback=True).of("critic")
    models = [DistributedDataParallel(make_products()) for _ in range(2)]
    for model in models:
        use_reduction(model, GradientReduction(compression=compression))
    for _ in range(2):
        models[0](torch.zeros(())).backward()
    with pytest.raises(ArgumentError, match=r"the error feedback of 'critic\.0\.1536' is that of the hooks of another"):
        models[1](torch.zeros(())).backward()


def test_ddp_models_with_buckets_of_one_size_need_names_of_their_own(pools: Pools) -> None:
    pools(2).run(twins_in_ddp)


def warnings_of_states_without_a_name() -> list[str]:
    compression, said = dist.Compression("onebit"), io.StringIO()
    handler = logging.StreamHandler(said)
    logger.addHandler(handler)
    try:
        compression.state_dict()
        handle, _ = with_hooks(make_products(), 2, compression)
        handle.model(torch.zeros(1)).sum().backward()
        for _ in range(2):
            assert compression.state_dict()["tensors"] == {}
        handle.remove()
    finally:
        logger.removeHandler(handler)
    return said.getvalue().splitlines()


def test_a_warning_says_that_states_without_a_name_are_not_saved(pools: Pools) -> None:
    for lines in pools(2).run(warnings_of_states_without_a_name):
        assert [line for line in lines if "state_dict" in line] == [
            "Compression.state_dict: the error feedback of 6 tensors without a name is not saved; name them with "
            "Compression.of(name), in GradientReduction(compression=...) as well"
        ]


# --- what is compared and refused at registration


def other_sizes(stage: int) -> str:
    compression = dist.Compression("int8", min_size_bytes=1000 * dist.get_rank())
    with pytest.raises(CollectiveMismatchError) as caught:
        with_hooks(make_products(), stage, compression)
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 2])
def test_ranks_that_compress_from_other_sizes_on(pools: Pools, stage: int) -> None:
    for text in pools(2).run(other_sizes, stage):
        assert "int8(block_size=256) with min_size_bytes=1000" in text
        assert "int8(block_size=256) with min_size_bytes=0" in text


def refused(stage: int, method: str) -> str:
    model = make_products()
    with pytest.raises(ArgumentError) as caught:
        with_hooks(model, stage, dist.Compression(method))
    with_hooks(model, stage, dist.Compression("int8", min_size_bytes=1 << 20))[0].remove()  # nothing is so large
    return str(caught.value)


def refused_where_deterministic(stage: int) -> list[str]:
    dist.set_deterministic_reductions(True)
    try:
        found = [refused(stage, "int8")]
        dist.set_compression("bf16")
        with pytest.raises(ArgumentError) as caught:
            register_data_parallel_hooks(make_products())
        found.append(str(caught.value))
    finally:
        dist.set_compression(None)
        dist.set_deterministic_reductions(False)
    return found


@pytest.mark.parametrize("stage", [0, 2])
def test_compression_is_refused_at_registration_where_reductions_are_deterministic(pools: Pools, stage: int) -> None:
    kind, operation = ("sharded", "reduce_scatter_tensor") if stage else ("data_parallel", "all_reduce")
    for own, default in pools(2).run(refused_where_deterministic, stage):
        assert own.startswith(
            f"register_{kind}_hooks: reduction: {operation}: compression: got 'int8' in this call on a group with "
        )
        assert "all_reduce: compression: got 'bf16' from set_compression() on a group with determ" in default
