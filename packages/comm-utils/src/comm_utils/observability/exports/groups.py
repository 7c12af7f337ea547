"""Groups of ranks in few characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from zlib import crc32

__all__ = ["format_ranks"]

# Ranks that are listed one by one, and characters that a group may take.
_LISTED, _LONGEST = 8, 60


@lru_cache(maxsize=1024)
def format_ranks(ranks: tuple[int, ...]) -> str:
    """``(0, 1)`` as ``"0 1"``; of more than eight ranks, runs as Linux lists CPUs: ``"0-63"``, ``"0-56:8 64-127"``.

    Different groups have different texts: what would still be long is cut short, with the number of ranks and a
    checksum of them.
    """
    if len(ranks) <= _LISTED:
        return " ".join(map(str, ranks))
    text = " ".join(_runs(ranks))
    if len(text) <= _LONGEST:
        return text
    checksum = crc32(" ".join(map(str, ranks)).encode())
    return f"{ranks[0]} {ranks[1]} ... {ranks[-1]} ({len(ranks)} ranks, {checksum:08x})"


def _runs(ranks: Sequence[int]) -> Iterator[str]:
    begin = 0
    while begin < len(ranks):
        end = begin + 1
        step = ranks[end] - ranks[begin] if end < len(ranks) else 0
        while step > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - begin < 3:
            end = begin + 1
            yield str(ranks[begin])
        else:
            yield f"{ranks[begin]}-{ranks[end - 1]}" + (f":{step}" if step > 1 else "")
        begin = end
