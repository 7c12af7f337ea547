"""A DDP step and a tensor-parallel forward pass, each with its communication and without."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from peers.data import Prepared

__all__ = ["prepare"]

# The data-parallel model: 3 layers, 12 MiB of weights; each rank has a batch of its own.
WIDTH, LAYERS, BATCH = 1024, 3, 32
# The tensor-parallel one: 4 blocks that widen and narrow again; after each, (TOKENS, WIDTH) is summed over the ranks.
BLOCKS, INNER, TOKENS = 4, 4096, 16
# Of the largest value: float32 sums of some thousand products, beside float64.
TOLERANCE = 1e-4


def prepare(task: Any, library: Any, rank: int, ranks: int) -> Prepared:
    make = data_parallel if task.operation.startswith("ddp") else tensor_parallel
    alone = task.operation.endswith("_alone")
    return make(library, rank, ranks, [rank] if alone else list(range(ranks)))


def is_wrong(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return not bool((got.double() - expected).abs().max() <= TOLERANCE * expected.abs().max())


def batch(rank: int, number: int, rows: int = BATCH) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 + 2 * rank + number % 2))


def mlp() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers)


def data_parallel(library: Any, rank: int, ranks: int, among: Sequence[int]) -> Prepared:
    """Forward, backward and SGD; ``among``: the ranks whose gradients are averaged, one or all."""
    model = mlp()
    module = DistributedDataParallel(model) if len(among) > 1 else model
    first = [parameter.detach().clone() for parameter in model.parameters()]
    inputs = [batch(rank, number) for number in (0, 1)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = inputs[0]

    def fill(number: int) -> None:
        nonlocal chosen
        chosen = inputs[number % 2]
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), first, strict=True):
                parameter.copy_(value)

    def step() -> None:
        optimizer.zero_grad()
        module(chosen).square().mean().backward()
        optimizer.step()

    @functools.cache
    def gradients(number: int) -> list[torch.Tensor]:
        reference = mlp().double()
        for one in among:
            (reference(batch(one, number).double()).square().mean() / len(among)).backward()
        return [parameter.grad for parameter in reference.parameters() if parameter.grad is not None]

    def wrong(number: int, calls: int) -> int:
        found = [parameter.grad for parameter in model.parameters()]
        pairs = zip(found, gradients(number % 2), strict=True)
        return sum(got is None or is_wrong(got, expected) for got, expected in pairs)

    return Prepared(step, (), fill, wrong)


def tensor_parallel(library: Any, rank: int, ranks: int, among: Sequence[int]) -> Prepared:
    """Blocks of which each rank has its columns of the first matrix and its rows of the second."""
    part = INNER // ranks
    generator = torch.Generator().manual_seed(1)
    wide = [torch.randn(WIDTH, INNER, generator=generator) / WIDTH**0.5 for _ in range(BLOCKS)]
    narrow = [torch.randn(INNER, WIDTH, generator=generator) / INNER**0.5 for _ in range(BLOCKS)]
    mine = slice(rank * part, (rank + 1) * part)
    shards = [(a[:, mine].contiguous(), b[mine].contiguous()) for a, b in zip(wide, narrow, strict=True)]
    inputs = [batch(0, number, TOKENS) for number in (0, 1)]
    chosen = output = inputs[0]
    reduce = library.reduce if len(among) > 1 else None

    def fill(number: int) -> None:
        nonlocal chosen
        chosen = inputs[number % 2]

    @torch.inference_mode()
    def forward() -> None:
        nonlocal output
        hidden = chosen
        for a, b in shards:
            hidden = torch.relu(hidden @ a) @ b
            if reduce is not None:
                reduce(hidden)
        output = hidden

    @functools.cache
    def expected(number: int) -> torch.Tensor:
        hidden = inputs[number].double()
        columns = slice(0, INNER) if len(among) > 1 else mine
        for a, b in zip(wide, narrow, strict=True):
            hidden = torch.relu(hidden @ a[:, columns].double()) @ b[columns].double()
        return hidden

    return Prepared(forward, (), fill, lambda number, calls: int(is_wrong(output, expected(number % 2))))
