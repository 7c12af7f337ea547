"""Lists of ranks as entries have them: the ranks of a large world take a few bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["LARGEST_GROUP", "MOST_RANKS", "packed_ranks", "unpacked_ranks"]

#: A reader takes no more ranks in one list.
LARGEST_GROUP = 1 << 16
#: And in all lists of one ring, or of one snapshot.
MOST_RANKS = 1 << 19
# Shorter ranges take no fewer bytes than their numbers.
_SHORTEST = 4


def packed_ranks(ranks: Sequence[int]) -> list[Any]:
    """Return ``ranks`` with each range of four and more as ``[begin, count, step]``."""
    found: list[Any] = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        end = at + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - at >= _SHORTEST:
            found.append([ranks[at], end - at, step])
        else:
            end = at + 1
            found.append(ranks[at])
        at = end
    return found


def unpacked_ranks(packed: Any, most: int = LARGEST_GROUP) -> tuple[int, ...]:
    """Return the ranks that :func:`packed_ranks` wrote.

    Raises:
        ValueError: they are more than ``most``, for which nothing was allocated, or a range is incomplete.
        TypeError: it is no list of ranks.
    """
    if not isinstance(packed, list):
        raise TypeError(f"{packed!r:.40} is no list of ranks")
    if any(isinstance(one, list) and len(one) != 3 for one in packed):
        raise ValueError("a range that is not [begin, count, step]")
    sizes = [int(one[1]) if isinstance(one, list) else 1 for one in packed]
    count = sum(sizes)
    if count > most or min(sizes, default=1) < 1:
        raise ValueError(f"a list of more ranks than {most}, or a range of none")
    found: list[int] = []
    for one in packed:
        if isinstance(one, list):
            begin, size, step = map(int, one)
            found += range(begin, begin + size * step, step) if step else [begin] * size
        else:
            found.append(int(one))
    return tuple(found)
