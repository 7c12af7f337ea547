"""The order in which receives of messages begin that are preceded by their descriptions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from comm_utils.errors import CommTimeoutError
from comm_utils.process_locks import ProcessLock

__all__ = ["Turn", "queue_up"]


@dataclass
class Turn:
    """The place of a receive among those of its group and tag.

    A description and its message have the same tag: a description that was awaited before the message of an earlier one
    would take that message. So a receive begins once those before it, from the same rank or from any, await theirs.

    Attributes:
        call: the program's and its rank, for messages.
        source: the global rank that it receives from; None for any.
        limit_s: how long it may wait for the receives before, from now on; None without a limit.
        before: the receives that it waits for.
        is_over: it awaits its message, or has failed.
        under_way: those of its group by tag, of which it is one until it is over.
    """

    call: str
    source: int | None
    tag: int
    limit_s: float | None
    before: list[Turn] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)
    under_way: dict[int, list[Turn]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._begin_s = time.monotonic()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the receives before; end the turn with the block.

        Raises:
            CommTimeoutError: one of them still has no message. Nothing was received, and the group is as before.
        """
        try:
            for one in self.before:
                if not one.is_over.wait(self._left_s()):
                    sender = "any rank" if one.source is None else f"rank {one.source}"
                    raise CommTimeoutError(
                        f"{self.call} timed out after {self.limit_s:g} s: an earlier receive from {sender} with tag "
                        f"{one.tag} still waits for its message, and strict checks receive in the order of the calls. "
                        "Nothing was received; the group stays usable. Wait for the earlier receive first, or use "
                        "another tag"
                    )
            self.before = []
            yield
        finally:
            self.end()

    def end(self) -> None:
        """Let the receives behind begin."""
        self.is_over.set()
        with _turn.lock:
            left = [one for one in self.under_way.pop(self.tag, []) if one is not self]
            if left:
                self.under_way[self.tag] = left

    def _left_s(self) -> float | None:
        return None if self.limit_s is None else max(0.0, self._begin_s + self.limit_s - time.monotonic())


_turn = ProcessLock(threading.Lock)
_turns: WeakKeyDictionary[ProcessGroup, dict[int, list[Turn]]] = WeakKeyDictionary()


def queue_up(turn: Turn, group: ProcessGroup) -> Turn:
    """Return ``turn``, of a receive that is about to begin, behind those of its group that are under way."""
    with _turn.lock:
        turn.under_way = _turns.setdefault(group, {})
        earlier = turn.under_way.setdefault(turn.tag, [])
        turn.before = [one for one in earlier if None in (turn.source, one.source) or turn.source == one.source]
        earlier.append(turn)
        return turn
