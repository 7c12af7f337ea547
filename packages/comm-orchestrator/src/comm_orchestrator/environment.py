"""Changing environment variables so that a failure leaves none behind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["applied"]


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
