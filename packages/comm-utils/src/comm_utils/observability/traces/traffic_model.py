"""Bytes that each rank sends to each other in one operation, by an algorithm that forwards nothing.

What a rank sends is counted as if every byte went straight from the rank that has it to the rank that needs it. With W
ranks in the group and a message of S bytes, of which part p belongs to rank p (S / W; where elements do not divide,
the first parts have one more):

===================================  ========================================================
send                                 S, from the sender to the receiver
broadcast                            S, from the root to each other rank
reduce                               S, from each other rank to the root
gather                               part i, from each other rank i to the root
scatter                              part j, from the root to each other rank j
all_gather                           part i, from each rank i to each other
reduce_scatter                       part j, from each other rank to each rank j
all_reduce                           both: part j and part i, from each rank i to each other j
all_to_all                           as the splits say, S / W where they are even
barrier                              nothing
===================================  ========================================================

What a library really sends depends on its algorithm: a ring moves as many bytes in total, but between neighbours only.
What a rank keeps is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from comm_utils.observability.traces.events import Operation
from comm_utils.operations import Content, Move, Side

__all__ = ["element_bytes", "received", "sent"]

_ELEMENT_BYTES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "complex32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}

#: What one rank sends, or receives: bytes by the other rank.
Row = dict[int, int]


def element_bytes(dtype: str) -> int:
    """Return the size of an element; 1 for what is not known, so that it can be divided anywhere."""
    return 1 if dtype.startswith("float8") else _ELEMENT_BYTES.get(dtype, 1)


def sent(operation: Operation, rank: int) -> Row:
    """Return the bytes that ``rank``, one of the group, has to send to each other rank by one such operation."""
    return _row(operation, rank, sends=True)


def received(operation: Operation, rank: int) -> Row:
    """Return the bytes that ``rank``, one of the group, has to receive from each other by one such operation."""
    return _row(operation, rank, sends=False)


def _row(operation: Operation, rank: int, sends: bool) -> Row:
    found: Row = {}
    for move in operation.pattern.moves:
        own, others = (move.senders, move.receivers) if sends else (move.receivers, move.senders)
        if own is Side.PEER or (own is Side.ROOT and rank != operation.root):
            continue
        of_each = _bytes(move, operation, rank, sends)
        for other in operation.ranks if others is Side.ALL else (operation.root,):
            if other >= 0 and other != rank and of_each[other] > 0:
                found[other] = found.get(other, 0) + of_each[other]
    return found


def _bytes(move: Move, operation: Operation, rank: int, sends: bool) -> Row:
    """Return what the move carries between ``rank`` and each rank of the group."""
    ranks = operation.ranks
    if move.content is Content.WHOLE:
        return dict.fromkeys(ranks, operation.size_bytes)
    if move.content is Content.NOTHING:
        return dict.fromkeys(ranks, 0)
    if move.content is Content.SPLITS:
        splits = operation.input_splits, operation.output_splits
        found = _by_splits(*(splits if sends else reversed(splits)), operation, rank)
        if found is not None:
            return found
    parts = _parts(operation)
    if (move.content is Content.SENDERS_PART) is sends:
        return dict.fromkeys(ranks, parts[ranks.index(rank)])
    return dict(zip(ranks, parts, strict=True))


def _parts(operation: Operation) -> list[int]:
    """Return the bytes of each rank's part."""
    unit, W = element_bytes(operation.dtype), operation.world_size
    whole, rest = divmod(operation.size_bytes, unit)
    each, more = divmod(whole, W)
    parts = [(each + (position < more)) * unit for position in range(W)]
    parts[-1] += rest
    return parts


def _by_splits(splits: Sequence[int], others: Sequence[int], operation: Operation, rank: int) -> Row | None:
    unit = element_bytes(operation.dtype)
    if splits:
        return {other: size * unit for other, size in zip(operation.ranks, splits, strict=True)}
    if others:  # even here and uneven on the other side: what a rank keeps is on both
        kept = others[operation.ranks.index(rank)] * unit
        return dict.fromkeys(operation.ranks, kept)
    return None
