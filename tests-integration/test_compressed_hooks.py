"""Hooks with compression: nothing but gradients is rounded, and what encodings lose arrives later."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import comm_orchestrator as dist
from comm_collectives.hooks import register_sharded_hooks
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
