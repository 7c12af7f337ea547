"""The process-wide slot for the active backend (what DeepSpeed calls ``cdb``)."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from comm_utils.errors import NotInitializedError
from comm_utils.fast_path import FastPathCache
from comm_utils.plugins import entry_points

if TYPE_CHECKING:
    from comm_utils.backend import Backend

__all__ = [
    "activate",
    "active_backend",
    "deactivate",
    "has_orchestrator",
    "how_to_initialize",
    "initializer",
    "is_active",
    "slot",
]


def has_orchestrator() -> bool:
    """Return True where ``comm_orchestrator`` is installed, to which errors may send users then."""
    # The interpreter that ends imports nothing any more.
    return sys.meta_path is not None and importlib.util.find_spec("comm_orchestrator") is not None


def initializer() -> str:
    """Return the name of the function that starts a world, for errors of the packages that are installed here."""
    return "init_distributed" if has_orchestrator() else "initialize"


def how_to_initialize() -> str:
    """Return what to call to set up communication, of the packages that are installed here."""
    if sys.meta_path is None:  # the interpreter ends, and imports nothing any more
        return "the process is ending: communicate earlier, and initialise that"
    if has_orchestrator():
        return "call comm_orchestrator.init_distributed()"
    providers = sorted(entry.value.replace(":", ".") for entry in entry_points("comm_utils.backends"))
    if not providers:
        return "install a backend with: pip install comm-orchestrator, and call comm_orchestrator.init_distributed()"
    calls = " or ".join(f"{provider}.initialize(setup)" for provider in providers)
    return f"pass what {calls} returns to comm_utils.activate()"


def _not_initialized() -> NotInitializedError:
    adopts = ""
    # Without an import: this package does not need torch.
    c10d = sys.modules.get("torch.distributed")
    if c10d is not None and c10d.is_available() and c10d.is_initialized():
        adopts = ", which adopts the world that torch.distributed has"
    return NotInitializedError(f"the distributed environment is not initialised; {how_to_initialize()} first{adopts}")


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
        raise _not_initialized()


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
    """Return whether a backend is in the slot. Never raises."""
    return not isinstance(slot.backend, _NoBackend)


def active_backend() -> Backend:
    """Return the active backend.

    Raises:
        NotInitializedError: nothing was activated.
    """
    if isinstance(slot.backend, _NoBackend):
        raise _not_initialized()
    return slot.backend
