"""Kinds of models and of training loops under each kind of hooks: losses are those of plain training on one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import comm_orchestrator as dist
from comm_collectives.hooks import (
    DataParallelOptions,
    GradientReduction,
    register_data_parallel_hooks,
    register_sharded_hooks,
)
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]

STEPS, PARTS, WORDS, WIDTH = 5, 2, 11, 8


class Adapted(nn.Module):
    """A linear layer with a low-rank update, as LoRA has it: the layer itself is frozen."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x) + self.up(self.down(x))
        return output


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.outer = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.outer(self.inner(self.norm(x)).relu())
        return output


class Language(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        self.reentrant = reentrant

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        output: torch.Tensor = self.output(x)
        return output


def tied() -> Language:
    model = Language()
    model.output.weight = model.embedding.weight
    return model


def tied_and_checkpointed() -> Language:
    model = Language(reentrant=False)
    model.output.weight = model.embedding.weight
    return model


def with_a_frozen_backbone() -> Language:
    model = Language()
    model.embedding.requires_grad_(False)
    model.blocks.requires_grad_(False)
    return model


def with_frozen_first_blocks() -> Language:
    model = Language()
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].outer.requires_grad_(False)
    return model


def adapted(reentrant: bool | None = None) -> Language:
    model = Language(reentrant).requires_grad_(False)
    for block in model.blocks:
        block.inner, block.outer = Adapted(block.inner), Adapted(block.outer)
    if reentrant is not None:  # as PEFT's enable_input_require_grads()
        model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))
    return model


KINDS: dict[str, Callable[[], Language]] = {
    "plain": Language,
    "tied": tied,
    "frozen backbone": with_a_frozen_backbone,
    "frozen first blocks": with_frozen_first_blocks,
    "adapters": adapted,
    "checkpointed": lambda: Language(reentrant=False),
    "checkpointed, reentrant": lambda: Language(reentrant=True),
    "tied and checkpointed": tied_and_checkpointed,
    "adapters, checkpointed": lambda: adapted(reentrant=False),
}
#: How the loop trains: of several parts, in mixed precision, clipped.
LOOPS: dict[str, tuple[bool, bool, bool]] = {
    "one backward": (False, False, False),
    "accumulated": (True, False, False),
    "autocast": (False, True, False),
    "all": (True, True, True),
}


def made(kind: str) -> Language:
    torch.manual_seed(0)
    return KINDS[kind]()


def loss_of(model: nn.Module, step: int, part: int, rank: int, mixed: bool) -> torch.Tensor:
    words = torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))
    with torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext():
        found = model(words[:, :-1])
    return nn.functional.cross_entropy(found.float().flatten(0, 1), words[:, 1:].flatten())


def plain_curve(kind: str, accumulates: bool, mixed: bool, clips: bool) -> list[float]:
    model, W = made(kind), dist.get_world_size()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    curve = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for part in range(PARTS if accumulates else 1):
            for rank in range(W):
                loss = loss_of(model, step, part, rank, mixed) / W
                loss.backward()
                total += loss.item()
        if clips:
            nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        curve.append(total)
    return curve


def hooked_curve(stage: int, codec: str | None, size: int, kind: str, loop: tuple[bool, bool, bool]) -> list[float]:
    accumulates, mixed, clips = loop
    model, reduction = made(kind), GradientReduction(compression=codec)
    curve = []
    handle: Any
    if stage:
        handle = register_sharded_hooks(model, stage, bucket_size_bytes=size, reduction=reduction)
        optimizer = torch.optim.AdamW(handle.parameter_groups(), lr=0.05)
        handle.attach(optimizer)
    else:
        options = DataParallelOptions(reduction, bucket_size_bytes=size, first_bucket_size_bytes=size)
        handle = register_data_parallel_hooks(model, options)
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.05)
    with handle:
        for step in range(STEPS):
            optimizer.zero_grad()
            total = torch.zeros(())
            parts = PARTS if accumulates else 1
            for part in range(parts):
                with ExitStack() as stack:
                    if part < parts - 1:
                        stack.enter_context(handle.no_sync())
                    loss = loss_of(model, step, part, dist.get_rank(), mixed)
                    loss.backward()
                    total += loss.detach()
            if clips and stage:
                handle.clip_grad_norm(0.5)
            elif clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            dist.all_reduce(total, "avg")
            curve.append(float(total))
    return curve


def curves(stage: int, codec: str | None) -> list[Any]:
    found = []
    for kind in KINDS:
        for name, loop in LOOPS.items():
            expected = plain_curve(kind, *loop)
            for size in (1, 1 << 20):
                try:
                    got: Any = hooked_curve(stage, codec, size, kind, loop)
                except Exception as error:
                    got = f"{type(error).__name__}: {error}"
                found.append((f"{kind}, {name}, {size}", expected, got))
    return found


@pytest.mark.parametrize("codec", [None, "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_are_those_of_plain_training(pools: Pools, stage: int, codec: str | None) -> None:
    for found in pools(2).run(curves, stage, codec, timeout_s=240):
        for name, expected, got in found:
            assert not isinstance(got, str), (name, got)
            tolerance = 1e-4 if codec is None else 2e-2
            assert got == pytest.approx(expected, rel=tolerance, abs=tolerance), name
