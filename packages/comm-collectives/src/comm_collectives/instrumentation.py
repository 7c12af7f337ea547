"""Putting wrappers around the active backend and taking them off."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from comm_collectives.labels import labelled
from comm_collectives.wrapping import Wrapper, bare_backend
from comm_utils.active import activate, active_backend
from comm_utils.backend import Backend

__all__ = ["bare_backend", "instrument", "instrumented", "labelled"]

_wrappers: WeakKeyDictionary[Backend, tuple[Wrapper, ...]] = WeakKeyDictionary()


def instrument(*wrappers: Wrapper) -> None:
    """Put ``wrappers`` around the active backend, in place of those that are around it; none takes all of them off.

    Every call of the user's reaches the last one first, and the first one last: ``instrument(compressing, recording)``
    records calls with the time that their compression takes, ``instrument(recording, compressing)`` what is sent.

    Args:
        wrappers: subclasses of :class:`comm_collectives.wrapping.BackendWrapper`, or functions of a backend that return
            an instance of one. They stay until the world ends, or this is called again.
    """
    backend = bare = bare_backend()
    for wrap in wrappers:
        backend = wrap(backend)
    bare.fast_paths.clear()  # those through other wrappers
    _wrappers[bare] = wrappers
    activate(backend)


def instrumented() -> tuple[Wrapper, ...]:
    """Return the wrappers that :func:`instrument` put around the active backend, in their order."""
    bare = bare_backend()
    return () if active_backend() is bare else _wrappers.get(bare, ())
