"""The calls of a block, noted in the place of being made."""

from __future__ import annotations

from collections.abc import Callable, Collection
from threading import get_ident
from typing import Any, TypeAlias, cast

from comm_collectives.gather_scatter import all_gather
from comm_utils import kernels
from comm_utils.errors import ArgumentError
from comm_utils.fast_path import FastPath, FastPathCache, FastPathKey

__all__ = ["CollectingPaths", "Run"]


#: Calls of one kind that follow each other: of each its tensor, or the tuple of them where there are more.
Run: TypeAlias = tuple[FastPathKey, list[Any]]


class CollectingPaths(FastPathCache):
    """Takes note of the calls of this thread in the place of making them.

    Args:
        usual: where calls of other threads are looked up.
        names: of the calls that are noted.
        runs: gets the calls.
        handle: what asynchronous calls return.
    """

    __slots__ = ("thread",)

    def __init__(self, usual: FastPathCache, names: Collection[str], runs: list[Run], handle: object) -> None:
        super().__init__()
        self.thread = get_ident()
        self.synchronous = _notes(usual.synchronous, names, runs, True)
        self.asynchronous = _notes(usual.asynchronous, names, runs, handle)


def _notes(
    usual: dict[FastPathKey, FastPath], names: Collection[str], runs: list[Run], outcome: object
) -> dict[FastPathKey, FastPath]:
    def make(key: FastPathKey) -> FastPath | None:
        if key[0] not in names:
            return None
        note = kernels.call_note(key, runs, outcome) or _note(key, runs, outcome)
        return _with_outputs(key[0], note) if key[0] == all_gather.__name__ else note

    found = kernels.call_notes(usual, make)
    return _Notes(usual, make) if found is None else cast("dict[FastPathKey, FastPath]", found)


class _Notes(dict[FastPathKey, FastPath]):
    """Do what ``kernels.call_notes`` does in native code."""

    def __init__(self, usual: dict[FastPathKey, FastPath], make: Callable[[FastPathKey], FastPath | None]) -> None:
        super().__init__()
        self._usual, self._make, self._thread = usual, make, get_ident()

    def get(self, key: FastPathKey, default: Any = None) -> Any:
        return self[key] if get_ident() == self._thread else self._usual.get(key)

    def __missing__(self, key: FastPathKey) -> FastPath | None:
        made = self._make(key)
        if made is not None:
            super().__setitem__(key, made)
        return made

    def __setitem__(self, key: FastPathKey, fast_path: FastPath) -> None:
        self._usual[key] = fast_path  # of a call that another thread has made


def _note(key: FastPathKey, runs: list[Run], outcome: object) -> FastPath:
    """Do what ``kernels.call_note`` does."""

    def note(*tensors: Any) -> Any:
        if not runs or runs[-1][0] is not key:
            runs.append((key, []))
        runs[-1][1].append(tensors[0] if len(tensors) == 1 else tensors)
        return outcome

    return note


def _with_outputs(name: str, note: FastPath) -> FastPath:
    def checked(outputs: Any, source: Any) -> Any:
        if outputs is None or source is None:
            raise ArgumentError(f"{name}: got no outputs within coalescing(), at whose end they are filled; give them")
        return note(outputs, source)

    return checked
