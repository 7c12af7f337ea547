"""Ranges of a flattened tensor as blocks of its own shape, which is how checkpoints describe parts of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

__all__ = ["Rectangle", "rectangles"]


class Rectangle(NamedTuple):
    """A block of a tensor whose elements follow one another in the flattened tensor.

    Attributes:
        offsets: its first element, an index for each dimension.
        sizes: one for each dimension.
        start: the place of its first element in the flattened tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def rectangles(shape: Sequence[int], begin: int, end: int) -> list[Rectangle]:
    """Return the fewest blocks that hold elements ``begin`` to ``end`` of a flattened tensor of ``shape``, in order.

    Of a matrix these are the rest of a row, whole rows, and the beginning of a row: at most 2d - 1 blocks of d
    dimensions. A tensor without elements is one block, by which a checkpoint knows it.

    Args:
        shape: of the tensor, contiguous.
        begin, end: the range, 0 to the number of elements.
    """
    shape = tuple(shape)
    if not prod(shape):
        return [Rectangle((0,) * len(shape), shape, 0)]
    if begin >= end:
        return []
    if not shape:
        return [Rectangle((), (), 0)]
    inner = prod(shape[1:])
    first, last = begin // inner, (end - 1) // inner
    if len(shape) == 1:
        return [Rectangle((begin,), (end - begin,), begin)]
    if first == last:
        return _within(shape, first, begin - first * inner, end - first * inner)
    found: list[Rectangle] = []
    if begin != first * inner:
        found += _within(shape, first, begin - first * inner, inner)
        first += 1
    whole_rows = end // inner - first
    if whole_rows > 0:
        zeros = (0,) * (len(shape) - 1)
        found.append(Rectangle((first, *zeros), (whole_rows, *shape[1:]), first * inner))
    if end % inner:
        found += _within(shape, last, 0, end - last * inner)
    return found


def _within(shape: tuple[int, ...], row: int, begin: int, end: int) -> list[Rectangle]:
    """Return the blocks of a range inside of one index of the first dimension."""
    inner = prod(shape[1:])
    return [
        Rectangle((row, *one.offsets), (1, *one.sizes), row * inner + one.start)
        for one in rectangles(shape[1:], begin, end)
    ]
