"""Hooks with compression: nothing but gradients is rounded, and what encodings lose arrives later."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import comm_orchestrator as dist
from comm_collectives.hooks import (
    DataParallelOptions,
    GradientReduction,
    register_data_parallel_hooks,
    register_sharded_hooks,
)
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


def mean_updates(stage: int, method: str, steps: int) -> list[float]:
    """Return the relative error of the mean update of each parameter; each bucket has one of them."""
    model = make_products()
    compression = dist.Compression(method, error_feedback=True)
    reduction, size_bytes = GradientReduction(compression=compression), 1024
    if stage:
        handle = register_sharded_hooks(model, stage, bucket_size_bytes=size_bytes, reduction=reduction)
        assert handle is not None
        optimizer = torch.optim.SGD(handle.parameter_groups(), lr=1.0)
        handle.attach(optimizer)
    else:
        options = DataParallelOptions(reduction, size_bytes, size_bytes)
        handle = register_data_parallel_hooks(model, options)
        assert handle is not None
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.zeros(())).backward()
        optimizer.step()
    handle.remove()
    pairs = [(one.weight.detach() / steps, one.gradient) for one in model]
    return [float((one + gradient).norm() / gradient.norm()) for one, gradient in pairs]


@pytest.mark.parametrize(("method", "steps", "limit"), [("int4", 40, 0.02), ("topk", 100, 0.35)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_hooks_make_up_for_what_each_bucket_lost(
    pools: Pools, stage: int, method: str, steps: int, limit: float
) -> None:
    for errors in pools(2).run(mean_updates, stage, method, steps):
        assert max(errors) < limit
