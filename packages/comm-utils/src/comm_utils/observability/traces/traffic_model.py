"""Which bytes a rank sends to which others in one operation, by an algorithm without detours.

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

from collections.abc import Callable, Sequence

from comm_utils.observability.traces.events import Operation

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
    """The size of an element; 1 for what is not known, so that it can be divided anywhere."""
    return 1 if dtype.startswith("float8") else _ELEMENT_BYTES.get(dtype, 1)


def sent(operation: Operation, rank: int) -> Row:
    """Bytes that ``rank``, one of the group, has to send to each other rank by one such operation."""
    return _row(operation, rank, _SENT)


def received(operation: Operation, rank: int) -> Row:
    """Bytes that ``rank``, one of the group, has to receive from each other rank by one such operation."""
    return _row(operation, rank, _RECEIVED)


def _row(operation: Operation, rank: int, table: dict[str, Callable[[Operation, int], Row]]) -> Row:
    counted = table.get(operation.operation)
    found = {} if counted is None else counted(operation, rank)
    return {other: size for other, size in found.items() if other != rank and size > 0}


def _parts(operation: Operation) -> list[int]:
    """Bytes of each rank's part."""
    unit, W = element_bytes(operation.dtype), operation.world_size
    whole, rest = divmod(operation.size_bytes, unit)
    each, more = divmod(whole, W)
    parts = [(each + (position < more)) * unit for position in range(W)]
    parts[-1] += rest
    return parts


def _nothing(operation: Operation, rank: int) -> Row:
    return {}


def _all(operation: Operation, rank: int) -> Row:
    return dict.fromkeys(operation.ranks, operation.size_bytes)


def _of_root(whole: Callable[[Operation, int], Row], operation: Operation, rank: int) -> Row:
    return whole(operation, rank) if rank == operation.root else {}


def _from_root(operation: Operation, rank: int) -> Row:
    return _of_root(_all, operation, rank)


def _with_root(operation: Operation, rank: int) -> Row:
    return {operation.root: operation.size_bytes}


def _own_part(operation: Operation, rank: int) -> Row:
    mine = _parts(operation)[operation.ranks.index(rank)]
    return dict.fromkeys(operation.ranks, mine)


def _each_part(operation: Operation, rank: int) -> Row:
    return dict(zip(operation.ranks, _parts(operation), strict=True))


def _own_part_with_root(operation: Operation, rank: int) -> Row:
    return {operation.root: _parts(operation)[operation.ranks.index(rank)]}


def _each_part_of_root(operation: Operation, rank: int) -> Row:
    return _of_root(_each_part, operation, rank)


def _both_parts(operation: Operation, rank: int) -> Row:
    mine = _own_part(operation, rank)
    return {other: size + mine[other] for other, size in _each_part(operation, rank).items()}


def _by_splits(splits: Sequence[int], others: Sequence[int], operation: Operation, rank: int) -> Row | None:
    unit = element_bytes(operation.dtype)
    if splits:
        return {other: size * unit for other, size in zip(operation.ranks, splits, strict=True)}
    if others:  # even here and uneven on the other side: what a rank keeps is on both
        kept = others[operation.ranks.index(rank)] * unit
        return dict.fromkeys(operation.ranks, kept)
    return None


def _to_all(operation: Operation, rank: int) -> Row:
    found = _by_splits(operation.input_splits, operation.output_splits, operation, rank)
    return _each_part(operation, rank) if found is None else found


def _from_all(operation: Operation, rank: int) -> Row:
    found = _by_splits(operation.output_splits, operation.input_splits, operation, rank)
    return _own_part(operation, rank) if found is None else found


def _message(operation: Operation, rank: int) -> Row:
    return {} if operation.root < 0 else {operation.root: operation.size_bytes}


_ALL_REDUCE = ("all_reduce", "all_reduce_coalesced", "inference_all_reduce")
_ALL_GATHER = ("all_gather", "all_gather_coalesced", "all_gather_into_tensor")
_REDUCE_SCATTER = ("reduce_scatter", "reduce_scatter_coalesced", "reduce_scatter_tensor")
_ALL_TO_ALL = ("all_to_all", "all_to_all_single")

_SENT: dict[str, Callable[[Operation, int], Row]] = {
    "barrier": _nothing,
    "broadcast": _from_root,
    "reduce": _with_root,
    "gather": _own_part_with_root,
    "scatter": _each_part_of_root,
    "send": _message,
    "isend": _message,
    "recv": _nothing,
    "irecv": _nothing,
    **dict.fromkeys(_ALL_REDUCE, _both_parts),
    **dict.fromkeys(_ALL_GATHER, _own_part),
    **dict.fromkeys(_REDUCE_SCATTER, _each_part),
    **dict.fromkeys(_ALL_TO_ALL, _to_all),
}
_RECEIVED: dict[str, Callable[[Operation, int], Row]] = {
    "barrier": _nothing,
    "broadcast": _with_root,
    "reduce": _from_root,
    "gather": _each_part_of_root,
    "scatter": _own_part_with_root,
    "send": _nothing,
    "isend": _nothing,
    "recv": _message,
    "irecv": _message,
    **dict.fromkeys(_ALL_REDUCE, _both_parts),
    **dict.fromkeys(_ALL_GATHER, _each_part),
    **dict.fromkeys(_REDUCE_SCATTER, _own_part),
    **dict.fromkeys(_ALL_TO_ALL, _from_all),
}
