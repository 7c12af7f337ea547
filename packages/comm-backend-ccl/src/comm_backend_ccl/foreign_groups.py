"""The backends of groups that another library serves, such as a group of gloo beside a world of ccl."""

from __future__ import annotations

from typing import cast

from comm_utils.backend import ENTRY_POINT_GROUP, Backend, BackendProvider
from comm_utils.errors import BackendUnavailableError
from comm_utils.fast_path import FastPathCache
from comm_utils.plugins import by_name, entry_points, load, said_twice

__all__ = ["ForeignGroups", "provider_for"]

# Adopts every c10d backend, so packages that know one better are asked before it.
_LAST = "torch"


def provider_for(library: str) -> tuple[str, BackendProvider]:
    """Return the installed provider that serves groups of the c10d backend ``library``, and its name.

    Raises:
        BackendUnavailableError: no installed package does.
    """
    found = [entry for entry in entry_points(ENTRY_POINT_GROUP) if entry.name != "ccl"]
    named = by_name(found)
    refused: list[str] = []
    for entry in sorted(found, key=lambda entry: (entry.name == _LAST, entry.name)):
        try:
            provider = cast(BackendProvider, load(entry))
            serves = provider.adopts(library)
        except Exception as error:  # whatever a package does, the others stay usable
            refused.append(f"; {entry.name} cannot be asked ({type(error).__name__}: {error})")
            continue
        if serves and len(named[entry.name]) > 1:
            raise BackendUnavailableError(
                f"backend {library!r} is served by {entry.name!r}, but {said_twice(named[entry.name])}; uninstall all "
                "but one"
            )
        if serves:
            return entry.name, provider
    raise BackendUnavailableError(
        f"backend {library!r} is not served by comm-backend-ccl, and no installed package serves it; install one that "
        f"does with: pip install comm-backend-torch{''.join(refused)}"
    )


class ForeignGroups:
    """The backends in use, by the name of their provider.

    Args:
        fast_paths: the cache of the owner; the backends empty it when a group of theirs ends or breaks.
    """

    def __init__(self, fast_paths: FastPathCache) -> None:
        self._fast_paths = fast_paths
        self._by_library: dict[str, Backend] = {}
        self._by_provider: dict[str, Backend] = {}

    def backend_for(self, library: str) -> Backend:
        """Return the backend that serves groups of the c10d backend ``library``.

        Raises:
            BackendUnavailableError: no installed package does.
        """
        backend = self._by_library.get(library)
        if backend is None:
            name, provider = provider_for(library)
            backend = self._by_provider.get(name)
            if backend is None:
                backend = self._by_provider[name] = provider.adopt()
                backend.fast_paths = self._fast_paths
            self._by_library[library] = backend
        return backend

    def find(self, library: str) -> Backend | None:
        """Return the backend if it is in use already, else None."""
        return self._by_library.get(library)

    def clear(self) -> None:
        """Drop the backends, and with them their references to groups."""
        self._by_library.clear()
        self._by_provider.clear()
