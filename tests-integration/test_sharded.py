"""Sharded training: the same curves as one process, memory of one part, wrong uses refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import comm_orchestrator as dist
from comm_collectives.hooks.sharded import Sharded, register_sharded_hooks
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]

WORDS, WIDTH, LENGTH = 37, 24, 6
# Divides by the numbers of ranks of the tests.
BATCH = 24


class Block(nn.Module):
    def __init__(self, is_checkpointed: str = "no") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 50), nn.Linear(50, WIDTH)
        self.is_checkpointed = is_checkpointed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.scale * self.down(F.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_checkpointed == "no":
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.is_checkpointed == "reentrant")


class Language(nn.Module):
    """A small transformer: tied weights, a block that is used twice, a frozen and an unused parameter."""

    def __init__(self, is_checkpointed: str = "no") -> None:
        super().__init__()
        # Gradients of what is used twice arrive twice with reentrant checkpoints, which is refused.
        self.repeats = is_checkpointed != "reentrant"
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block(is_checkpointed) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places
        for block in [*self.blocks, *self.blocks[: self.repeats]]:
            x = block(x)
        # The weight of another module, read here.
        return F.linear(self.norm(self.frozen(x)), self.words.weight)


def make_model(seed: int = 0, is_checkpointed: str = "no") -> Language:
    torch.manual_seed(seed)
    return Language(is_checkpointed)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


def loss_of(model: nn.Module, step: int, rank: int = 0, world_size: int = 1, part: int = 0, parts: int = 1) -> Any:
    tokens, targets = (one.chunk(world_size)[rank].chunk(parts)[part] for one in batch(step))
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
}


def with_groups(model: Language) -> list[dict[str, Any]]:
    """Decay for matrices only, and another learning rate for the embedding."""
    flat = [one for one in model.parameters() if one.dim() < 2 and one.requires_grad]
    words = model.words.weight
    matrices = [one for one in model.parameters() if one.dim() == 2 and one.requires_grad and one is not words]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": flat, "weight_decay": 0.0},
        {"params": [words], "lr": 1e-3, "weight_decay": 0.0},
    ]


def plain_curve(optimizer: str, grouped: bool, clip: float | None, steps: int, is_checkpointed: str) -> list[float]:
    model, losses = make_model(is_checkpointed=is_checkpointed), []
    trained = [one for name, one in model.named_parameters() if one.requires_grad]
    stepper = OPTIMIZERS[optimizer](with_groups(model) if grouped else trained)
    for step in range(steps):
        stepper.zero_grad()
        # Parts of a sharded parameter that were not used have a gradient of zero.
        for one in model.unused.parameters():
            one.grad = torch.zeros_like(one)
        loss = loss_of(model, step)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(trained, clip)
        stepper.step()
        losses.append(loss.item())
    return losses


def sharded_curve(
    stage: int,
    optimizer: str = "adam",
    grouped: bool = False,
    clip: float | None = None,
    accumulate: str = "no",
    is_checkpointed: str = "no",
    bucket_size_bytes: int = 9000,
    prefetch: bool = True,
    steps: int = 4,
) -> list[float]:
    rank, W = dist.get_rank(), dist.get_world_size()
    # Other values than those of the first rank are replaced.
    model, losses = make_model(seed=rank, is_checkpointed=is_checkpointed), []
    with registered(model, stage, bucket_size_bytes=bucket_size_bytes, prefetch=prefetch) as handle:
        stepper = OPTIMIZERS[optimizer](handle.parameter_groups(with_groups(model) if grouped else None))
        handle.attach(stepper)
        for step in range(steps):
            stepper.zero_grad()
            parts = 1 if accumulate == "no" else 2
            total = 0.0
            for part in range(parts):
                if accumulate == "no_sync" and part == 0:
                    with handle.no_sync():
                        loss = loss_of(model, step, rank, W, part, parts) / parts
                        loss.backward()
                else:
                    loss = loss_of(model, step, rank, W, part, parts) / parts
                    loss.backward()
                total += loss.item()
            if clip is not None:
                handle.clip_grad_norm(clip)
            stepper.step()
            mean = torch.tensor(total)
            dist.all_reduce(mean, "avg")
            losses.append(mean.item())
    return losses


def registered(model: nn.Module, stage: int, **options: Any) -> Sharded:
    handle = register_sharded_hooks(model, stage, **options)
    assert handle is not None
    return handle


CASES: list[dict[str, Any]] = [
    {"optimizer": "sgd"},
    {"optimizer": "adam", "grouped": True, "clip": 0.5},
    {"accumulate": "yes", "bucket_size_bytes": 1 << 20},
    {"accumulate": "no_sync", "optimizer": "sgd", "prefetch": False},
    {"is_checkpointed": "yes", "bucket_size_bytes": 1},
    {"is_checkpointed": "reentrant"},
]


def all_cases(cases: list[dict[str, Any]]) -> list[tuple[str, list[float], list[float]]]:
    found = []
    gc.collect()  # what earlier tests left in cycles
    for stage in (1, 2, 3):
        for case in cases:
            plain = {
                name: case.get(name, other)
                for name, other in {
                    "optimizer": "adam",
                    "grouped": False,
                    "clip": None,
                    "steps": 4,
                    "is_checkpointed": "no",
                }.items()
            }
            found.append((f"stage {stage}, {case}", sharded_curve(stage, **case), plain_curve(**plain)))
    assert dist.shared_memory_stats()["used_bytes"] == 0
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_curves_are_those_of_one_process(pools: Pools, world_size: int) -> None:
    # With each number of ranks other than two, another half of the cases.
    for found in pools(world_size).run(all_cases, CASES if world_size == 2 else CASES[world_size % 2 :: 2]):
        for case, got, expected in found:
            assert got == pytest.approx(expected, rel=1e-4), case
