"""Weak sets that several threads use."""

from __future__ import annotations

from typing import TypeVar
from weakref import WeakSet

__all__ = ["members_of"]

T = TypeVar("T")


def members_of(found: WeakSet[T]) -> list[T]:
    """Return the members of a set to which other threads may be adding some, which ends an iteration with an error."""
    while True:
        try:
            return list(found)
        except RuntimeError:
            continue
