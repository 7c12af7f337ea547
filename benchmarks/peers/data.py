"""What a rank sends, and what it has to receive: the inputs of every rank are known to all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from measuring import PERIOD

from peers.tasks import Task

__all__ = ["Data", "Prepared", "Unsupported"]

# Multiples of these have sums of four that are exact in the type.
STEPS = {"float32": 2**20, "bfloat16": 2**5, "float16": 2**5}
# What keeps the values in range while a sum in place grows from call to call; float16 has room for some twenty.
SCALES = {"float32": 2.0**-100, "bfloat16": 2.0**-100, "float16": 2.0**-8}


class Unsupported(Exception):
    """A library does not do this at all; the message says why."""


@dataclass
class Prepared:
    """Calls of one task that are ready to be made.

    ``fill(number)`` writes new inputs; ``wrong(number, calls)`` counts the wrong parts of the results after ``calls``
    calls on them.
    """

    function: Callable[..., object]
    arguments: tuple[Any, ...]
    fill: Callable[[int], None]
    wrong: Callable[[int, int], int]


class Data:
    """The inputs of all ranks, which repeat after ``PERIOD`` elements, and the results."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.values = functools.cache(self._values)

    def _values(self, dtype: str, of: int | None, scale: float) -> torch.Tensor:
        """A period of the input of rank ``of``, or of the sum of all in float64, times ``scale``."""
        if of is None:
            total = sum(self.integers(one, STEPS[dtype]) for one in range(self.ranks))
        else:
            total = self.integers(of, STEPS[dtype])
        return (total * (scale / STEPS[dtype])).to(getattr(torch, dtype))  # type: ignore[union-attr]

    @staticmethod
    def integers(rank: int, most: int) -> torch.Tensor:
        return torch.randint(-most, most, (PERIOD,), generator=torch.Generator().manual_seed(rank)).double()

    def scale(self, task: Task, number: int) -> float:
        # In turns, so that what is left of the call before would be wrong.
        return (1 + number % 2) * (SCALES[task.dtype] if task.operation == "all_reduce" else 1.0)

    def fill(self, task: Task, source: torch.Tensor, target: torch.Tensor, number: int) -> None:
        scale = self.scale(task, number)
        if task.operation == "broadcast" and self.rank:
            source.fill_(-1)
            return
        values = self.values(task.dtype, self.rank, scale)
        # A rank contributes its own part of what is gathered, so that no part of the whole is like another.
        start = self.rank * source.numel() if task.operation == "all_gather_into_tensor" else 0
        for part, expected in stretches(source, start, values):
            part.copy_(expected)
        if target is not source:
            # Of every page something, which a wrong result cannot be.
            target[::1024].fill_(-3)

    def wrong(self, task: Task, source: torch.Tensor, target: torch.Tensor, number: int, calls: int) -> int:
        """How many parts of the result are not what they have to be, to the bit."""
        scale = self.scale(task, number)
        count = target.numel()

        def differing(part: torch.Tensor, of: int | None, start: int, scale: float) -> int:
            values = self.values(task.dtype, of, scale)
            return sum(not torch.equal(got, expected) for got, expected in stretches(part, start, values))

        if task.operation == "all_reduce":
            return differing(source, None, 0, scale * float(self.ranks) ** (calls - 1))
        if task.operation == "broadcast":
            return differing(source, 0, 0, scale)
        if task.operation == "reduce_scatter_tensor":
            return differing(target, None, self.rank * count, scale)
        each = count // self.ranks
        parts = [target[of * each : (of + 1) * each] for of in range(self.ranks)]
        # All-to-all sends each rank the part of its own number.
        gathered = task.operation == "all_gather_into_tensor"
        return sum(differing(part, of, (of if gathered else self.rank) * each, scale) for of, part in enumerate(parts))


def stretches(tensor: torch.Tensor, start: int, values: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of ``tensor`` and what each holds where it is a piece, from element ``start``, of ``values`` repeated."""
    found, done = [], 0
    while done < tensor.numel():
        first = (start + done) % PERIOD
        length = min(PERIOD - first, tensor.numel() - done)
        found.append((tensor[done : done + length], values[first : first + length]))
        done += length
    return found
