"""Backends that wrap a backend, and the bare one below them."""

from __future__ import annotations

from comm_utils.active import active_backend
from comm_utils.backend import Backend

__all__ = ["bare_backend"]


def bare_backend() -> Backend:
    """Return the active backend without wrappers."""
    backend = active_backend()
    while (inner := getattr(backend, "inner", None)) is not None:
        backend = inner
    return backend
