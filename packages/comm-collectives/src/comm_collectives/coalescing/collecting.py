"""Fast paths that collect the calls of a block instead of executing them."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple, TypeAlias, cast

from comm_collectives.all_gather import all_gather
from comm_utils import kernels
from comm_utils.errors import ArgumentError
from comm_utils.fast_path import FastPath, FastPathCache, FastPathKey

__all__ = ["CollectingCache", "Run"]

#: Consecutive calls of one kind: of each its tensor, or the tuple of them where there are more.
Run: TypeAlias = tuple[FastPathKey, list[Any]]


class _Collected(NamedTuple):
    runs: list[Run]
    handle: object


class CollectingCache(FastPathCache):
    """The fast paths of a backend while some threads collect their calls.

    Args:
        usual: the backend's own, for other threads.
        names: of the calls that are collected.
    """

    __slots__ = ("_blocks", "_names", "_threads", "usual")

    def __init__(self, usual: FastPathCache, names: frozenset[str]) -> None:
        super().__init__()
        self.usual, self._names = usual, names
        self._blocks: dict[int, _Collected] = {}
        #: Fast paths of each thread that collects: of synchronous calls, and of asynchronous ones.
        self._threads: tuple[dict[int, dict[Any, Any]], dict[int, dict[Any, Any]]] = {}, {}

    def begin(self, runs: list[Run], handle: object) -> int:
        """Collect the calls of this thread in ``runs``; asynchronous ones return ``handle``. Return what ends it."""
        thread = get_ident()
        if not self._blocks:
            self.synchronous = self._collecting(self.usual.synchronous, self._threads[0], False)
            self.asynchronous = self._collecting(self.usual.asynchronous, self._threads[1], True)
        self._blocks[thread] = _Collected(runs, handle)
        for threads in self._threads:
            threads[thread] = {}
        self._forget()
        return thread

    def end(self, thread: int) -> None:
        """Collect the calls of the thread no more."""
        for threads in self._threads:
            del threads[thread]
        self._forget()
        del self._blocks[thread]
        if not self._blocks:  # this also breaks the cycle of references
            self.synchronous, self.asynchronous = self.usual.synchronous, self.usual.asynchronous

    def _forget(self) -> None:
        for paths in (self.synchronous, self.asynchronous):
            cast("kernels.CollectingPaths", paths).forget()

    @property
    def is_collecting(self) -> bool:
        """Return whether any thread collects its calls."""
        return bool(self._blocks)

    @property
    def collects_here(self) -> bool:
        """Return whether this thread does."""
        return get_ident() in self._blocks

    def clear(self) -> None:
        """Forget the backend's own; what is collected stays."""
        self.usual.clear()

    def memo(self, name: str) -> dict[Any, Any]:
        """Return the backend's own."""
        return self.usual.memo(name)

    def _collecting(
        self, fallback: dict[FastPathKey, FastPath], threads: dict[int, dict[Any, Any]], asynchronous: bool
    ) -> dict[FastPathKey, FastPath]:
        def make(key: FastPathKey) -> FastPath | None:
            if key[0] not in self._names:
                return None
            runs, handle = self._blocks[get_ident()]
            return_value = handle if asynchronous else True
            path = kernels.collecting_path(key, runs, return_value) or _collecting_path(key, runs, return_value)
            return _with_outputs(key[0], path) if key[0] == all_gather.__name__ else path

        found = kernels.collecting_paths(fallback, threads, make)
        # Heads use no more of a dictionary than this has.
        return cast(
            "dict[FastPathKey, FastPath]", _CollectingPaths(fallback, threads, make) if found is None else found
        )


class _CollectingPaths:
    """Does what ``kernels.collecting_paths`` does in native code."""

    def __init__(
        self, fallback: kernels.PathsByKey, threads: dict[int, dict[Any, Any]], make: Callable[[Any], Any]
    ) -> None:
        self._fallback, self._threads, self._make = fallback, threads, make

    def get(self, key: FastPathKey) -> FastPath | None:
        known = self._threads.get(get_ident())
        if known is None:
            return cast("FastPath | None", self._fallback.get(key))
        found = known.get(key)
        if found is None:
            found = self._make(key)
            if found is not None:
                known[key] = found
        return cast("FastPath | None", found)

    def forget(self) -> None:
        """Do nothing: no answer is remembered."""

    def __setitem__(self, key: FastPathKey, fast_path: FastPath) -> None:
        self._fallback[key] = fast_path  # of a call that another thread has made


def _collecting_path(key: FastPathKey, runs: list[Run], return_value: object) -> FastPath:
    """Do what ``kernels.collecting_path`` does."""

    def collect(*tensors: Any) -> Any:
        if not runs or runs[-1][0] is not key:
            runs.append((key, []))
        runs[-1][1].append(tensors[0] if len(tensors) == 1 else tensors)
        return return_value

    return collect


def _with_outputs(name: str, collect: FastPath) -> FastPath:
    def checked(outputs: Any, source: Any) -> Any:
        if outputs is None or source is None:
            raise ArgumentError(f"{name}: got no outputs within coalescing(), at whose end they are filled; give them")
        return collect(outputs, source)

    return checked
