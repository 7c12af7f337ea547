"""Each stage's memory on a rank, measured from storages, and the flat memory that is in use at one time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import comm_orchestrator as dist
from comm_collectives.hooks import MemoryUse, register_sharded_hooks
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]

LAYERS, WIDTH = 8, 128
# A whole number of parts for 1, 2 and 4 ranks, so that padding does not count.
BYTES = LAYERS * WIDTH * WIDTH * 4


def make_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def used(stage: int) -> tuple[MemoryUse, int, int]:
    """Return the memory after a step, and the largest gradient memory and parameter memory of its backward."""
    model = make_model()
    grads, parameters = [], []
    with register_sharded_hooks(model, stage, bucket_size_bytes=WIDTH * WIDTH * 4) as handle:
        optimizer = torch.optim.Adam(handle.parameter_groups())
        handle.attach(optimizer)

        def look(module: nn.Module, inputs: object, outputs: object) -> None:
            parameters.append(handle.memory().parameter_bytes)
            grads.append(handle.memory().gradient_bytes)

        for layer in model:
            layer.register_full_backward_hook(look)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()
            after_backward = handle.memory()
            optimizer.step()
        after_step = handle.memory()
    return (
        MemoryUse(after_step.parameter_bytes, after_backward.gradient_bytes, after_step.optimizer_bytes),
        max(grads),
        max(parameters),
    )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_memory_follows_the_number_of_ranks(pools: Pools, world_size: int) -> None:
    layer, part = BYTES // LAYERS, BYTES // world_size
    slack = 2048  # step counts and placeholders
    for stage in (1, 2, 3):
        for after, most_gradients, most_parameters in pools(world_size).run(used, stage):
            assert after.optimizer_bytes == pytest.approx(2 * part, abs=slack), stage
            # Stage 1 keeps the gradients of all parameters beside this rank's part.
            expected = BYTES + part if stage == 1 else part
            assert after.gradient_bytes == pytest.approx(expected, abs=slack), stage
            assert after.parameter_bytes == pytest.approx(part if stage == 3 else BYTES, abs=slack), stage
            if stage > 1:
                # Two buckets that are reduced, and one that is filled.
                assert most_gradients <= part + 3 * layer + slack, stage
            if stage == 3:
                # The layer in use, the next one and the one that was used.
                assert most_parameters <= part + 3 * layer + slack
                assert most_parameters > part + slack


def mapped() -> int:
    """Return the shared memory that stays when the hooks of two models are removed."""
    before = dist.shared_memory_stats()["used_bytes"]
    for stage in (1, 2, 3):
        models = [make_model() for _ in range(2)]
        handles = [register_sharded_hooks(model, stage) for model in models]
        optimizers = [torch.optim.SGD(handle.parameter_groups(), lr=0.1) for handle in handles]
        sum(model(torch.randn(4, WIDTH)).sum() for model in models).backward()
        for handle, optimizer in zip(handles, optimizers, strict=True):
            optimizer.step()
            handle.gather()
            handle.remove()
            handle.remove()
    return dist.shared_memory_stats()["used_bytes"] - before


def test_removal_frees_shared_memory(pools: Pools) -> None:
    assert pools(2).run(mapped) == [0, 0]
