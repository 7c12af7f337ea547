"""Operations under way whose handles nobody holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Dropped"]

_T = TypeVar("_T")
# At so many of them, in turn, each look asks: it must not take longer the more there are.
_LOOKS = 4


class Dropped(deque[_T]):
    """Keeps what operations use, whose handles were dropped before their end, until they have ended.

    Args:
        has_ended: returns whether an operation needs nothing more, and does what is left to do then.
    """

    def __init__(self, has_ended: Callable[[_T], bool]) -> None:
        super().__init__()
        self._has_ended = has_ended

    def add(self, one: _T) -> None:
        """Keep ``one``, and look at a few of all."""
        self.append(one)
        self.look()

    def look(self, most: int = _LOOKS) -> None:
        """Let go of those that have ended, of up to ``most``."""
        for _ in range(min(most, len(self))):
            try:
                one = self.popleft()
            except IndexError:  # another thread looks as well
                return
            is_kept = True
            try:
                is_kept = not self._has_ended(one)
            finally:  # also after an exception of a signal handler
                if is_kept:
                    self.append(one)
