"""Groups, calls and failures, as rings have them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from comm_utils import operations
from comm_utils.group_names import group_text, name_of
from comm_utils.operations import Pattern, patterns

__all__ = ["UNKNOWN_GROUP", "Call", "Failure", "RingGroup", "RingHeader", "Stack"]


@dataclass(frozen=True)
class RingHeader:
    """The process that wrote a ring.

    Attributes:
        identity: the same for processes of one host that see each other.
        started: when the process began, in clock ticks since boot; 0 is unknown.
        wall_ns, monotonic_ns: both clocks at the opening.
        state: 0 while it runs, 1 after a clean end, 2 after a failure.
        signal: by which it has said that it ends; 0 is none. SIGKILL leaves no time to say so.
        image: of the program that it ran (:func:`~comm_utils.process_state.process_image`); 0 is unknown.
    """

    rank: int
    world_size: int
    pid: int
    started: int
    wall_ns: int
    monotonic_ns: int
    state: int = 0
    signal: int = 0
    host: str = ""
    identity: str = ""
    job: str = ""
    python: str = ""
    program: str = ""
    image: int = 0

    @property
    def process(self) -> tuple[int, int, int]:
        """Return the process, as :func:`~comm_utils.process_state.process_state` takes it."""
        return self.pid, self.started, self.image

    def wall_s(self, monotonic_ns: int) -> float:
        """Return the time of day, in seconds since 1970, of a time by the monotonic clock."""
        return (self.wall_ns + monotonic_ns - self.monotonic_ns) / 1e9


@dataclass(frozen=True)
class RingGroup:
    """A group of ranks; ``name`` is the same on all members.

    Attributes:
        timeout_s: of its calls; infinite where it is not known.
    """

    name: str
    ranks: tuple[int, ...]
    description: str = ""
    backend: str = ""
    timeout_s: float = field(default=math.inf, compare=False)

    @classmethod
    def of(cls, group: Any, ranks: Sequence[int]) -> RingGroup:
        """Return a process group of torch, whose global ranks are ``ranks``, as rings describe it."""
        return cls(name_of(group), tuple(ranks), str(getattr(group, "group_desc", "")))

    def __str__(self) -> str:
        return group_text(self.ranks, self.description)


@dataclass(frozen=True)
class Call:
    """One call of one rank.

    Attributes:
        lane: 0 for calls that Python makes, 1 for those that the engine in shared memory records.
        number: in the lane, from 1.
        begin_ns, end_ns: by the monotonic clock; ``end_ns`` is 0 while it is under way.
        operation: as the backend names it; ``call`` is the user's.
        root, peer: global ranks; -1 is none, or any.
        elements: of the whole tensor, or of a rank's part.
        in_series: its number among the collectives of its group, or among the messages of one pair, direction and tag.
        digest: of this and all earlier ones that ``in_series`` counts; 0 in lane 1.
        sent, received: elements to and from each rank, where they were given.
        joined: of several tensors in one: their number from bit 48 on, and below a digest of their sizes; 0 is one.
        caller: ``file:line function``; "" is unknown.
        is_waited_for: False of an asynchronous call whose handle nobody waits for yet.
        is_on_device: the host has gone on; a device is to complete it.
        is_limited: it is under way and ends by itself soon: it has a timeout of its own, or its group has a short one.
    """

    lane: int
    number: int
    begin_ns: int
    end_ns: int
    failed: bool
    group: RingGroup
    operation: str
    call: str
    dtype: str
    op: str
    root: int
    peer: int
    tag: int
    elements: int
    in_series: int
    digest: int
    sent: tuple[int, ...] | None = None
    received: tuple[int, ...] | None = None
    joined: int = 0
    caller: str = ""
    is_waited_for: bool = True
    is_limited: bool = False
    is_on_device: bool = False

    @property
    def is_message(self) -> bool:
        """Return whether it is a ``send`` or a ``recv``."""
        return self._pattern.is_message

    @property
    def is_send(self) -> bool:
        """Return whether it is the sending side of a message."""
        return self._pattern.is_send

    @property
    def is_native(self) -> bool:
        """Return whether the engine in shared memory recorded it, which compares split sizes itself."""
        return self.lane == 1

    @property
    def is_uneven(self) -> bool:
        """Return whether its ranks may have different numbers of elements; those of a reduction have not."""
        return self._pattern.uneven and not self.op

    @property
    def _pattern(self) -> Pattern:
        row = operations.find(self.operation)
        return patterns.BARRIER if row is None else row.pattern

    @property
    def is_open(self) -> bool:
        """Return whether it is under way."""
        return self.end_ns == 0

    @property
    def name(self) -> str:
        """Return the user's call."""
        return self.call or self.operation

    def __str__(self) -> str:
        joined = f" in {self.joined >> 48} tensors" if self.joined else ""
        parts = [f"{self.elements} elements of {self.dtype}{joined}"] if self.dtype else []
        parts += [f"op {self.op}"] if self.op else []
        parts += [f"root {self.root}"] if self.root >= 0 else []
        if self.is_message:
            word = "to" if self.is_send else "from"
            parts.append(f"{word} {'any rank' if self.peer < 0 else f'rank {self.peer}'}, tag {self.tag}")
        if self.sent is not None:
            parts.append(f"parts {list(self.sent)} sent, {list(self.received or ())} received")
        return f"{self.name}({', '.join(parts)})"


@dataclass(frozen=True)
class Failure:
    """An error that a rank raised.

    Attributes:
        group: the name of the group; "" where it was the program's own.
        error: the name of the class.
        text: the cause.
        ranks: those that are the cause.
    """

    group: str
    error: str
    text: str
    at_ns: int
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stack:
    """The place of a process in Python.

    Attributes:
        text: a line for each frame, the innermost last; stacks of several threads are parted by empty lines, and the
            last one is that of the thread that makes calls.
    """

    text: str
    at_ns: int

    @property
    def by_thread(self) -> tuple[str, ...]:
        """Return the stack of the thread that makes calls, and then those of the others."""
        return tuple(one.strip("\n") for one in reversed(self.text.split("\n\n")) if one.strip())


UNKNOWN_GROUP = RingGroup("", ())
