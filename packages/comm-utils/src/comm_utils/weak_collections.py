"""Weak collections that several threads use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

__all__ = ["members_of"]

T = TypeVar("T")


def members_of(found: Iterable[T]) -> list[T]:
    """Return the members of a weak set, or of a view of a weak dictionary, to which other threads may be adding some.

    An iteration ends with an error where one is added meanwhile.
    """
    while True:
        try:
            return list(found)
        except RuntimeError:
            continue
