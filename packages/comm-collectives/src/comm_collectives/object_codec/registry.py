"""Classes of the user's whose instances may travel: dataclasses, enums and named tuples that were registered."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any, TypeVar

from comm_utils.errors import ArgumentError, ArgumentTypeError

__all__ = ["can_register", "class_of", "name_of", "register_object_type"]

_T = TypeVar("_T", bound=type)


class _Registered:
    names: dict[type, str] = {}  # noqa: RUF012
    classes: dict[str, type] = {}  # noqa: RUF012


def register_object_type(cls: _T, name: str | None = None) -> _T:
    """Let instances of ``cls`` be sent to other ranks; do so on every rank. Returns ``cls``, so it is a decorator too.

    Of a dataclass its fields travel, and it is rebuilt without a call of ``__init__`` or ``__post_init__``; of an enum,
    the names of members; of a named tuple, its items.

    Args:
        cls: a dataclass, an ``Enum`` or a named tuple; not its subclasses.
        name: under which it travels; the same on every rank. By default its module and qualified name.

    Raises:
        ArgumentTypeError: ``cls`` is none of these.
        ArgumentError: the name belongs to another class, or the class has another name.
    """
    call = "register_object_type"
    if not isinstance(cls, type) or not can_register(cls):
        raise ArgumentTypeError(
            f"{call}: cls: got {cls!r:.80}; expected a dataclass, an Enum or a named tuple: a class, not an instance"
        )
    if name is not None and (not isinstance(name, str) or not name):
        raise ArgumentTypeError(f"{call}: name: got {name!r:.60}; expected a string that is not empty")
    chosen = name or _default_name(cls)
    known = _Registered.names.get(cls)
    if known is not None and known != chosen:
        raise ArgumentError(f"{call}: name: got {chosen!r}; {cls.__qualname__} is registered as {known!r} already")
    other = _Registered.classes.get(chosen)
    if other is not None and other is not cls:
        # A notebook cell or a reloaded module defines the same class again.
        if _default_name(other) != _default_name(cls):
            raise ArgumentError(
                f"{call}: name: got {chosen!r}, under which {_default_name(other)} is registered; pass another name"
            )
        del _Registered.names[other]
    _Registered.names[cls] = chosen
    _Registered.classes[chosen] = cls
    return cls


def name_of(cls: type) -> str | None:
    """Return the name under which ``cls`` was registered; None if it was not."""
    return _Registered.names.get(cls)


def class_of(name: str) -> type | None:
    """Return the class that was registered under ``name``."""
    return _Registered.classes.get(name)


def can_register(cls: type[Any]) -> bool:
    """Return whether ``cls`` is of a kind whose instances can travel."""
    if issubclass(cls, Enum):
        return True
    if issubclass(cls, tuple):
        return isinstance(getattr(cls, "_fields", None), tuple)
    if not dataclasses.is_dataclass(cls):
        return False
    try:
        object.__new__(cls)
    except TypeError:  # abstract, or with a builtin among its bases that has state of its own
        return False
    return True


def _default_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
