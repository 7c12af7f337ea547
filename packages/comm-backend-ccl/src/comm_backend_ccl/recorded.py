"""The calls of oneCCL's groups in the flight recorder; the engine in shared memory records its own in native code."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch

from comm_backend_ccl.tables import RECORDED_CODES, Operation
from comm_utils import operations
from comm_utils.flight_recorder.layout import IN_BACKGROUND
from comm_utils.flight_recorder.recorder import RECORDER, WAITED_FOR, Kind
from comm_utils.flight_recorder.reduce_op import asked_op
from comm_utils.torch_support.recorded_calls import KindsByDtype, Note, dtype_name

__all__ = ["kinds_by_dtype", "note_call"]


class _Group(Protocol):
    """The attributes of a communicator that are recorded."""

    ranks: list[int]
    size: int

    def recorded_as(self) -> int: ...


def note_call(ours: _Group, call: Any, depth: int) -> Note:
    """Record that a call begins.

    Args:
        call: a ``communicator.Call``.
        depth: the caller is looked for so many frames above, and further up.
    """
    name = RECORDED_CODES["operations"][call.operation]
    pattern = operations.get(name).pattern
    root = call.root if pattern.is_rooted or pattern.is_message else -1
    rank = ours.ranks[root] if 0 <= root < ours.size else -1
    uneven = call.operation is Operation.ALL_TO_ALL_V
    kind = RECORDER.kind(
        ours.recorded_as(),
        name,
        "",
        "" if pattern.is_empty else dtype_name(call.source.dtype),
        asked_op(call.op.name.lower() if pattern.reduces else ""),
        -1 if pattern.is_message else rank,
        rank if pattern.is_message else -1,
        call.tag,
    )
    sent, received = (call.source_counts, call.target_counts) if uneven else (None, None)
    elements = call.source.numel() // ours.size if uneven else call.elements
    return Note(kind, kind.begin(elements, depth + 1, sent, received, IN_BACKGROUND if call.watched else WAITED_FOR))


def kinds_by_dtype(
    ours: _Group, operation: str, call: str, op: str = "", root: int = -1
) -> dict[torch.dtype | None, Kind]:
    """Return the kinds of the calls of one fast path.

    Args:
        operation: as ``Backend.fast_path`` names it.
        root: the group rank of the root or the peer; -1 has none.
    """
    row = operations.get(operation)
    is_message, rank = row.pattern.is_message, ours.ranks[root] if root >= 0 else -1
    describe = partial(
        RECORDER.kind,
        ours.recorded_as(),
        operation if is_message else row.measured_as,
        call,
        op=asked_op(op),
        root=rank if row.pattern.is_rooted and not is_message else -1,
        peer=rank if is_message else -1,
    )
    return KindsByDtype(describe)
