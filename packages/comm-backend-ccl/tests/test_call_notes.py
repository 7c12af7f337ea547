"""Noting calls in native code is what ``comm_collectives.coalescing`` does in Python."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

from comm_backend_ccl import kernels, shared_memory

pytestmark = pytest.mark.skipif(not shared_memory.has_kernels(), reason="built without native code")


def test_calls_of_one_kind_that_follow_each_other_are_one_run() -> None:
    runs: list[Any] = []
    one, other = ("all_reduce", "sum", None), ("all_gather", None, None)
    note, note_other = kernels.call_note(one, runs, True), kernels.call_note(other, runs, "handle")
    assert note is not None
    assert note_other is not None
    assert note(1) is True
    assert note((2,)) is True
    assert note_other(3, 4) == "handle"
    assert note_other() == "handle"
    assert note(5) is True
    assert runs == [(one, [1, (2,)]), (other, [(3, 4), ()]), (one, [5])]


def test_a_key_is_made_once_and_other_threads_see_the_usual() -> None:
    made: list[Any] = []

    def make(key: str) -> Any:
        made.append(key)
        return None if key == "none" else key.upper

    usual: dict[Any, Any] = {"a": "usual"}
    notes = kernels.call_notes(usual, make)
    assert notes.get("a")() == "A"
    assert notes.get("a")() == "A"
    assert notes.get("none") is None
    assert notes.get("none") is None
    assert made == ["a", "none", "none"]
    found: list[Any] = []

    def look() -> None:
        found.extend([notes.get("a"), notes.get("b")])
        notes["b"] = "set"

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == ["usual", None]
    assert usual == {"a": "usual", "b": "set"}
    assert notes.get("b")() == "B"
    del notes["b"]
    assert usual == {"a": "usual"}
    with pytest.raises(TypeError, match="unhashable"):
        notes.get([])
    with pytest.raises(TypeError, match="expected a key"):
        notes.get()


def test_an_error_in_make_is_raised() -> None:
    notes = kernels.call_notes({}, lambda key: 1 / key)
    with pytest.raises(ZeroDivisionError):
        notes.get(0)


def hold(runs: list[Any], kept: object) -> None:
    """Make objects that hold each other, ``runs`` and ``kept``."""
    note = kernels.call_note("key", runs, kept)
    notes = kernels.call_notes({}, lambda _: (kept, holder))
    holder = [notes, note]
    runs.append(note)
    notes.get(1)


def test_cycles_are_collected() -> None:
    class Kept:
        pass

    kept = Kept()
    gone = weakref.ref(kept)
    hold([], kept)
    del kept
    assert gone() is not None
    gc.collect()
    assert gone() is None
