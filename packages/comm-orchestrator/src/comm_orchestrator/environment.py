"""Changing environment variables so that a failure leaves none behind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["applied", "given"]

# What was set here; of the user's environment it is no part.
_ours: dict[str, str] = {}


def given() -> dict[str, str]:
    """The environment without what :func:`applied` set at an earlier time and nobody has changed since."""
    return {name: value for name, value in os.environ.items() if _ours.get(name) != value}


@contextmanager
def applied(variables: Mapping[str, str]) -> Iterator[None]:
    """Set ``variables`` for the libraries that read them; if the block raises, put back what was there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    except BaseException:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        raise
    _ours.update(variables)
