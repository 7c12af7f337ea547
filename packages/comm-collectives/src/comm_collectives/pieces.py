"""Cut tensors into pieces, of which one travels while others are prepared or used."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["pieces"]


def pieces(count: int, unit: int, longest: int, shortest: int, first: int) -> Iterator[slice]:
    """Cut ``count`` elements into pieces of a multiple of ``unit``, but for the last one.

    Pieces become shorter towards the end, because the link has nothing to carry while the last is used.

    Args:
        longest, shortest, first: elements of these pieces, multiples of ``unit``. From a short ``first`` on, pieces
            become longer, as the link has nothing to carry while the first is prepared.
    """
    begin, rising = 0, first
    while begin < count:
        half = -(-(count - begin) // (2 * unit)) * unit
        length = min(longest, rising, max(half, shortest))
        yield slice(begin, min(begin + length, count))
        begin, rising = begin + length, 2 * rising
