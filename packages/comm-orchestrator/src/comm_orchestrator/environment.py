"""Environment variables that are set for as long as there is a world, and not a moment longer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["apply_variables", "restore_variables"]

# variable -> (what was there before, what it was set to)
_ours: dict[str, tuple[str | None, str]] = {}


def _set(variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        before = _ours[name][0] if name in _ours else os.environ.get(name)
        _ours[name] = (before, value)
        os.environ[name] = value


def restore_variables() -> None:
    """Undo every change that nobody else has changed since."""
    for name, (before, ours) in _ours.items():
        if os.environ.get(name) != ours:
            continue
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    _ours.clear()


@contextmanager
def apply_variables(*groups: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the libraries that read them; put everything back if the block raises."""
    for variables in groups:
        _set(variables)
    try:
        yield
    except BaseException:
        restore_variables()
        raise
