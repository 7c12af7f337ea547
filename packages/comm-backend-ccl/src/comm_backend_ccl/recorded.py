"""The calls of oneCCL's groups in the flight recorder; the engine in shared memory records its own in native code."""

from __future__ import annotations

from typing import Protocol

from comm_backend_ccl.engine_call import Call
from comm_backend_ccl.tables import RECORDED_CODES, Operation
from comm_utils import operations
from comm_utils.flight_recorder.layout import IN_BACKGROUND
from comm_utils.flight_recorder.recorder import WAITED_FOR
from comm_utils.torch_support.recorded_calls import Note, kind_of_call

__all__ = ["note_call"]


class _Group(Protocol):
    """The attributes of a communicator that are recorded."""

    ranks: list[int]
    size: int

    def recorded_as(self) -> int: ...


def note_call(ours: _Group, call: Call, depth: int) -> Note:
    """Record that a call begins.

    Args:
        depth: the caller is looked for so many frames above, and further up.
    """
    name = RECORDED_CODES["operations"][call.operation]
    pattern = operations.get(name).pattern
    has_root = (pattern.is_rooted or pattern.is_message) and 0 <= call.root < ours.size
    uneven = call.operation is Operation.ALL_TO_ALL_V
    kind = kind_of_call(
        ours.recorded_as(),
        ours.ranks,
        name,
        call.name,
        None if pattern.is_empty else call.source.dtype,
        op=call.op.name.lower() if pattern.reduces else "",
        root=call.root if has_root else -1,
        tag=call.tag,
    )
    sent, received = (call.source_counts, call.target_counts) if uneven else (None, None)
    elements = call.source.numel() // ours.size if uneven else call.elements
    return Note(kind, kind.begin(elements, depth + 1, sent, received, IN_BACKGROUND if call.watched else WAITED_FOR))
