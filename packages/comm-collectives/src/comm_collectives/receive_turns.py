"""The order in which receives of messages begin that are preceded by their descriptions."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from comm_utils.errors import CommTimeoutError

__all__ = ["Turn", "turn_of"]


@dataclass
class Turn:
    """The place of a receive among those of its group and tag.

    A description and its message have the same tag: a description that was awaited before the message of an earlier one
    would take that message. So a receive begins once those before it, from the same rank or from any, await theirs.

    Attributes:
        source: the group rank that it receives from; None for any.
        before: the receives that it waits for.
        is_over: it awaits its message, or has failed.
    """

    source: int | None
    before: list[Turn]
    is_over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def taken(self, call: str, limit_s: float | None = None) -> Iterator[None]:
        """Wait for the receives before, each of which ends at the timeout of its group; end the turn with the block.

        Args:
            call: the program's, for messages.
            limit_s: how long it may wait for the receives before.

        Raises:
            CommTimeoutError: one of them still has no message. Nothing was received.
        """
        end = None if limit_s is None else time.monotonic() + limit_s
        try:
            for one in self.before:
                if not one.is_over.wait(None if end is None else max(0.0, end - time.monotonic())):
                    sender = "any rank" if one.source is None else f"rank {one.source} of the group"
                    raise CommTimeoutError(
                        f"{call} did not begin within {limit_s:g} s: strict checks receive messages of a tag in the "
                        f"order of the calls, and an earlier receive from {sender} still waits for its message; the "
                        "group may be used further"
                    )
            self.before = []
            yield
        finally:
            self.is_over.set()


_lock = threading.Lock()
_turns: WeakKeyDictionary[ProcessGroup, dict[int, list[Turn]]] = WeakKeyDictionary()


def turn_of(group: ProcessGroup, tag: int, source: int | None) -> Turn:
    """Return the turn of a receive that is about to begin."""
    with _lock:
        of_tags = _turns.setdefault(group, defaultdict(list))
        under_way = [one for one in of_tags[tag] if not one.is_over.is_set()]
        turn = Turn(source, [one for one in under_way if None in (source, one.source) or source == one.source])
        of_tags[tag] = [*under_way, turn]
        return turn
