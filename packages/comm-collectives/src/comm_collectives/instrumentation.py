"""Putting wrappers around the active backend and taking them off."""

from __future__ import annotations

from comm_collectives.observed import Observed
from comm_collectives.observing import labelled
from comm_utils.active import activate, active_backend
from comm_utils.backend import Backend
from comm_utils.comms_logger import CommsLogger

__all__ = ["bare_backend", "instrument", "labelled"]


def bare_backend() -> Backend:
    """The active backend without wrappers."""
    backend = active_backend()
    while isinstance(backend, Observed):
        backend = backend.inner
    return backend


def instrument(observe: CommsLogger | None = None) -> None:
    """Make the active backend record into ``observe``; None takes the wrapper off, and what it costs."""
    backend = bare_backend()
    backend.prepared.clear()  # what was prepared with the wrapper, or without it
    activate(backend if observe is None else Observed(backend, observe))
