"""Contents of a trace: operations, the events in which they happened, and the rank that recorded them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from comm_utils import operations

__all__ = ["HIERARCHICAL", "Event", "Operation", "RankTrace", "Wait"]


#: The beginning of the method of calls in steps within hosts and between them.
HIERARCHICAL = "hierarchical"


@dataclass(frozen=True)
class Operation:
    """The properties that calls of one kind share.

    Attributes:
        name: recorded under this: ``log_name`` of the call, or else the operation.
        operation: the name of a row of :mod:`comm_utils.operations`.
        size_bytes: as nccl-tests counts it: the larger of a rank's two buffers.
        ranks: the global ranks of the group, in the order of the group.
        group: the group's name, the same on all its ranks.
        dtype: such as ``"float32"``; empty for a barrier.
        op: the reduction, such as ``"sum"``; empty where nothing is reduced.
        root: global rank of ``src`` or ``dst`` of broadcast, reduce, gather and scatter, or of a message's other side;
            -1 where there is none, or for a receive from anybody.
        tag: of messages.
        asynchronous: the call returned a handle.
        input_splits: the elements of ``dtype`` that go to each rank of the group; empty where they are even.
        output_splits: likewise, from each rank.
        caller: with ``debug``, the function that called.
        on_device: the tensor is on an accelerator, whose own times these are.
        method: how it was done where that was not the library's own way: a codec, such as
            ``"int8(block_size=256)"``, or ``"hierarchical(2 hosts x 2 ranks)"``.
        wire_bytes: what the rank sends; between hosts where it is hierarchical; 0 without a method.
    """

    name: str
    operation: str
    size_bytes: int
    ranks: tuple[int, ...]
    group: str = ""
    dtype: str = ""
    op: str = ""
    root: int = -1
    tag: int = 0
    asynchronous: bool = False
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()
    caller: str = ""
    on_device: bool = False
    method: str = ""
    wire_bytes: int = 0

    @property
    def codec(self) -> str:
        """Return what compressed it; empty for nothing."""
        return "" if self.method.startswith(HIERARCHICAL) else self.method

    @property
    def world_size(self) -> int:
        """Return the number of ranks in the group."""
        return len(self.ranks)

    @cached_property
    def pattern(self) -> operations.Pattern:
        """Return how the operation moves data.

        Raises:
            UnknownOperationError: no row has its name.
        """
        return operations.get(self.operation).pattern


@dataclass(frozen=True)
class Wait:
    """Somebody waited for an asynchronous operation; ns on the rank's own clock."""

    begin_ns: int
    end_ns: int


@dataclass
class Event:
    """One operation as one rank saw it.

    Attributes:
        operation: what happened.
        sequence: collectives: the how-manieth of its group, counted alike on all its ranks; messages: the how-manieth
            between these two ranks in this direction with this tag; -1 where that is not known.
        begin_ns: when it was called, on the rank's own clock until
            :func:`comm_utils.observability.traces.alignment.aligned`.
        end_ns: when it was complete.
        returned_ns: when an asynchronous call returned; equal to ``end_ns`` for others. On a device, whose streams the
            call does not hold up, equal to ``begin_ns``.
        waits: for it, in order.
    """

    operation: Operation
    sequence: int
    begin_ns: int
    end_ns: int
    returned_ns: int
    waits: list[Wait] = field(default_factory=list)

    @property
    def duration_ns(self) -> int:
        """Return the time from the call to completion."""
        return self.end_ns - self.begin_ns


@dataclass
class RankTrace:
    """The records of one rank.

    Attributes:
        offset_ns: its clock minus rank 0's at ``offset_at_ns``, on its own clock, give or take ``uncertainty_ns``.
        job: the same on all ranks of one recording, and on no others.
        counted_together: all ranks began to count their calls at the same one.
        drift: how much its clock gains on rank 0's, in seconds a second.
        dropped: events that it does not have, such as those of operations that were under way at the end.
        complete: the recording was ended, not cut off.
    """

    rank: int
    world_size: int
    host: str = ""
    pid: int = 0
    backend: str = ""
    started: str = ""
    offset_ns: int = 0
    offset_at_ns: int = 0
    job: str = ""
    counted_together: bool = False
    drift: float = 0.0
    uncertainty_ns: int = 0
    dropped: int = 0
    complete: bool = True
    events: list[Event] = field(default_factory=list)
