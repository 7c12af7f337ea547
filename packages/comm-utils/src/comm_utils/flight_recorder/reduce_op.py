"""The reduce op of the call that operations belong to, where the operations themselves reduce nothing, or another way.

A reduction may travel as an exchange and be done by the ranks, or an average as a sum. Records and comparisons are
about what the program asked for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from comm_utils.reduce_op import parse_reduce_op

__all__ = ["asked_op", "reduces_by", "reducing"]

P = ParamSpec("P")
T = TypeVar("T")

_asked: ContextVar[str] = ContextVar("asked_op", default="")


def asked_op(own: str) -> str:
    """Return the reduce op that the program asked for; ``own`` is that of the operation."""
    return _asked.get() or own


@contextmanager
def reducing(op: object) -> Iterator[None]:
    """Have the operations that begin in the block recorded with ``op``; None is their own."""
    token = _asked.set("" if op is None else parse_reduce_op(op).name.lower())
    try:
        yield
    finally:
        _asked.reset(token)


def reduces_by(function: Callable[P, T]) -> Callable[P, T]:
    """Have the operations that ``function`` begins recorded with its argument ``op``."""
    place = list(inspect.signature(function).parameters).index("op")

    @functools.wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> T:
        with reducing(kwargs.get("op", args[place] if place < len(args) else "sum")):
            return function(*args, **kwargs)

    return recorded
