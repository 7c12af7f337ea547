"""Locks among the threads of one process, for modules and classes, which live as long as it does.

A child that is forked while another thread holds such a lock would wait for ever, as it does not have that thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["ProcessLock"]

L = TypeVar("L")
_every: list[ProcessLock[object]] = []


class ProcessLock(Generic[L]):
    """A lock that a forked child has anew; ask for it at each use: ``with _turn.lock:``.

    Args:
        make: returns a new lock, such as ``threading.Lock``.

    Attributes:
        lock: of this process.
    """

    def __init__(self, make: Callable[[], L]) -> None:
        self._make = make
        self.lock = make()
        _every.append(self)  # type: ignore[arg-type]

    def renew(self) -> None:
        """Leave the lock to the process that forked this one."""
        self.lock = self._make()


def _renew() -> None:
    for one in _every:
        one.renew()


os.register_at_fork(after_in_child=_renew)
