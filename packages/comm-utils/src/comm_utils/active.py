"""The process-wide slot for the active backend (what DeepSpeed calls ``cdb``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comm_utils.errors import NotInitializedError
from comm_utils.fast_path import FastPathCache

if TYPE_CHECKING:
    from comm_utils.backend import Backend

__all__ = ["activate", "active_backend", "deactivate", "is_active", "slot"]

_REMEDY = "the distributed environment is not initialised; call comm_orchestrator.init_distributed() first"


class _Slot:
    __slots__ = ("backend", "fast_paths")

    def __init__(self) -> None:
        self.backend: Backend = _NoBackend()  # type: ignore[assignment]
        self.fast_paths = FastPathCache()


class _NoBackend:
    """Stands in the empty slot, so that a call before initialisation says what to do instead of failing on None."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotInitializedError(_REMEDY)


#: Holds the active backend in ``slot.backend``, and in ``slot.fast_paths`` the backend's own, which are empty without a
#: backend. Collectives read them at every call; only :func:`activate` and :func:`deactivate` write them.
slot = _Slot()


def activate(backend: Backend) -> None:
    """Make ``backend`` the one that every collective of this process uses from now on."""
    slot.backend = backend
    # A backend that takes no part in fast paths, such as one that a test makes up, need not have a cache.
    slot.fast_paths = getattr(backend, "fast_paths", None) or FastPathCache()


def deactivate() -> None:
    """Empty the slot."""
    slot.backend = _NoBackend()  # type: ignore[assignment]
    slot.fast_paths = FastPathCache()


def is_active() -> bool:
    """Whether a backend is in the slot. Never raises."""
    return not isinstance(slot.backend, _NoBackend)


def active_backend() -> Backend:
    """The active backend.

    Raises:
        NotInitializedError: nothing was activated.
    """
    if isinstance(slot.backend, _NoBackend):
        raise NotInitializedError(_REMEDY)
    return slot.backend
