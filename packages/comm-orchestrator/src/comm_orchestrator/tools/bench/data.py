"""Inputs and expected outputs: the inputs of every rank are known to all.

An input repeats a period of numbers that is different for every rank and every call, so that a result which is stale,
another rank's or in the wrong place is wrong in nearly every element. The period is a prime: parts of a power of two of
elements begin at different places in it.

What is moved is compared bit by bit. Reductions have small whole numbers whose results are exact in their type,
whatever the order; only an average over a number of ranks that is no power of two may differ from the exact one, by as
many units in the last place as there are ranks.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from comm_orchestrator.tools.bench.plan import Row

__all__ = ["PERIOD", "Bound", "Data"]

PERIOD = 65521
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POISON = -86
#: Periods compared at once, to bound what a comparison allocates.
_AT_ONCE = 64


class Bound(Protocol):
    """The part of a codec that says how far elements may be off."""

    def bound(self, elements: torch.Tensor) -> torch.Tensor:
        """Return how far each of ``elements`` may be off, of the same shape."""


class Data:
    """The inputs and results of a group; ``members`` are its global ranks, ``rank`` is this one's place among them."""

    def __init__(self, members: list[int], rank: int, device: torch.device) -> None:
        self.members, self.rank, self.device = members, rank, device
        self._table = functools.lru_cache(maxsize=16)(self._make_table)
        self._reduced = functools.lru_cache(maxsize=4)(self._make_reduced)

    def fill(self, row: Row, source: torch.Tensor, target: torch.Tensor, call: int, lossy: bool = False) -> None:
        """Write inputs for the ``call``-th call, and an output that no call leaves; ``target`` may be ``source``.

        Args:
            lossy: numbers are to be moved, not any bits: what moves them rounds.
        """
        _bits(target).fill_(_POISON)
        if row.pattern.is_empty:
            return
        if lossy and not row.pattern.reduces and source.dtype.is_floating_point:
            _write(source, self._contribution(self.rank, source.dtype, "sum", call))
        elif row.pattern.reduces:
            _write(source, self._contribution(self.rank, source.dtype, row.op, call))
        elif self._sends(row):
            _write(_bits(source), self._moved(self.rank, source.dtype, call))

    def wrong(self, row: Row, source: torch.Tensor, target: torch.Tensor, call: int, codec: Bound | None = None) -> int:
        """Return how many elements of this rank's output are not what the ``call``-th call has to leave.

        Args:
            codec: what compressed it, whose bound elements have to keep.
        """
        pattern, n = row.pattern, row.count
        if pattern.is_empty or not self._receives(row):
            return 0
        # A receiver's part lies at its place in what the sender has, or in what is reduced.
        start = self.rank * n if pattern.uneven or pattern.output_is_part else 0
        if codec is not None:
            return self._far(row, target, start, call, codec)
        if pattern.reduces:
            expected, tolerance = self._reduced(target.dtype, row.op, call)
            return _differing(target, start, expected, tolerance)
        got, dtype = _bits(target), target.dtype
        if pattern.from_root or pattern.is_message:
            sender = row.root if pattern.from_root else 0
            return _differing(got, start, self._moved(sender, dtype, call))
        return sum(
            _differing(got[one * n : (one + 1) * n], start, self._moved(one, dtype, call))
            for one in range(len(self.members))
        )

    def _far(self, row: Row, target: torch.Tensor, start: int, call: int, codec: Bound) -> int:
        """Return how many elements are further from the exact ones than their encodings allow."""
        size, n, op = len(self.members), row.count, row.op or "sum"
        numbers = [self._whole_numbers(one, target.dtype, op, call).double() for one in range(size)]
        rounding = torch.finfo(target.dtype).eps

        def lost(largest: float) -> float:
            return float(codec.bound(torch.full((1,), largest))) + rounding * largest

        if not row.pattern.reduces:
            return sum(
                _differing(target[one * n : (one + 1) * n], start, part.to(self.device), within=lost(float(part.max())))
                for one, part in enumerate(numbers)
            )
        # Each part is encoded once, and the result as well, where all ranks get it.
        share = size if op == "avg" else 1
        exact, of_parts = torch.stack(numbers).sum(0) / share, sum(lost(float(part.max())) for part in numbers) / share
        within = of_parts + lost(float(exact.max()) + of_parts)
        return _differing(target, start, exact.to(self.device), within=within)

    def _receives(self, row: Row) -> bool:
        if row.pattern.is_message:  # of a ping-pong, both ends do
            return self.rank in (0, len(self.members) - 1)
        return self.rank == row.root or not row.pattern.to_root

    def _sends(self, row: Row) -> bool:
        if row.pattern.is_message:
            return self.rank == 0
        return self.rank == row.root or not row.pattern.from_root

    def _make_table(self, rank: int) -> torch.Tensor:
        """(PERIOD,) of int64: any bits, of global rank ``rank``."""
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(-(2**63), 2**63 - 1, (PERIOD,), generator=generator)

    def _numbers(self, position: int, call: int) -> torch.Tensor:
        """(PERIOD,) of int64, for the member at ``position``; every fourth call begins at another place."""
        return self._table(self.members[position]).roll(-7919 * (call // 4) % PERIOD)

    def _moved(self, position: int, dtype: torch.dtype, call: int) -> torch.Tensor:
        # The last byte, which every type has, differs from that of the three calls before.
        return (self._numbers(position, call) + 61 * (call % 4)).to(_SIGNED[dtype.itemsize]).to(self.device)

    def _contribution(self, position: int, dtype: torch.dtype, op: str, call: int) -> torch.Tensor:
        found = self._whole_numbers(position, dtype, op, call)
        return _as(found, dtype).to(self.device)

    def _whole_numbers(self, position: int, dtype: torch.dtype, op: str, call: int) -> torch.Tensor:
        """Return the contribution of the member at ``position``, (PERIOD,) of int64."""
        size, numbers, places = len(self.members), self._numbers(position, call), torch.arange(PERIOD)
        if op == "product":
            # Powers of two, eight of them at most, and signs; one rank's changes with every call.
            doubled = (numbers & 1) * ((places + position) % -(-size // 8) == 0)
            sign = 1 - (numbers & 2) - 2 * (call % 2) * ((places + position) % size == 0) * (1 - (numbers & 2))
            return sign << doubled
        if op in ("min", "max"):
            return (numbers & 63) + call % 4
        # Sums are whole numbers that the type has: of fewer ranks where all would be too many.
        most = _largest_exact(dtype)
        every = -(-size * 5 // most)
        values = max(2, min(100, most // (-(-size // every)) - 3))
        return (numbers.remainder(values) + call % 4) * ((places + position) % every == 0)

    def _make_reduced(self, dtype: torch.dtype, op: str, call: int) -> tuple[torch.Tensor, float]:
        """Return the expected result, (PERIOD,), and the relative error that a correct element may have."""
        size = len(self.members)
        total = self._whole_numbers(0, dtype, op, call)
        for position in range(1, size):
            one = self._whole_numbers(position, dtype, op, call)
            total = _combined(op, total, one)
        if op != "avg":
            return _as(total, dtype).to(self.device), 0.0
        exact = size & (size - 1) == 0
        tolerance = 0.0 if exact else size * torch.finfo(dtype).eps
        return (total.double() / size).to(dtype if exact else torch.float64).to(self.device), tolerance


def _combined(op: str, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if op in ("sum", "avg"):
        return one + other
    if op == "product":
        return one * other
    return torch.minimum(one, other) if op == "min" else torch.maximum(one, other)


def _largest_exact(dtype: torch.dtype) -> int:
    """Up to here the type has every whole number; integers wrap around, which is exact too."""
    return int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else 2**31


def _as(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int64 as ``dtype``; unsigned ones by way of the signed type of their size, which torch can do everything with."""
    return numbers.to(dtype) if dtype.is_floating_point else numbers.to(_SIGNED[dtype.itemsize])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_SIGNED[tensor.dtype.itemsize])


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype.is_floating_point else _bits(tensor)


def _write(tensor: torch.Tensor, period: torch.Tensor) -> None:
    """Fill (n,) with as many periods as fit, and the beginning of another."""
    tensor = _comparable(tensor)
    whole = tensor.numel() // PERIOD * PERIOD
    tensor[:whole].view(-1, PERIOD).copy_(period.expand(whole // PERIOD, PERIOD))
    tensor[whole:].copy_(period[: tensor.numel() - whole])


def _differing(
    tensor: torch.Tensor, start: int, period: torch.Tensor, tolerance: float = 0.0, within: float = 0.0
) -> int:
    """Return how many elements of (n,) are not those of ``period``, repeated, from its element ``start`` on.

    Args:
        tolerance: a share of the expected element by which a correct one may differ.
        within: an error that it may have.
    """
    tensor, period = _comparable(tensor), period.roll(-(start % PERIOD))
    whole = tensor.numel() // PERIOD * PERIOD
    periods = tensor[:whole].view(-1, PERIOD)
    found = _count(tensor[whole:], period[: tensor.numel() - whole], tolerance, within)
    for first in range(0, len(periods), _AT_ONCE):
        found += _count(periods[first : first + _AT_ONCE], period, tolerance, within)
    return found


def _count(got: torch.Tensor, expected: torch.Tensor, tolerance: float, within: float) -> int:
    if not tolerance and not within:
        return int(got.ne(expected).sum())
    near = (got.double() - expected).abs() <= expected.abs() * tolerance + within
    return int((~near).sum())  # which NaN is not, either
