"""Collecting calls in native code is what ``comm_collectives.coalescing`` does in Python."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

from comm_backend_ccl import kernels, native_module
from comm_utils.kernels import CollectingPaths

pytestmark = pytest.mark.skipif(not native_module.has_kernels(), reason="built without native code")


def paths_of(fallback: Any, threads: dict[int, dict[Any, Any]], make: Any) -> CollectingPaths:
    found = kernels.collecting_paths(fallback, threads, make)
    assert found is not None
    return found


def test_consecutive_calls_of_one_kind_are_one_run() -> None:
    runs: list[Any] = []
    one, other = ("all_reduce", "sum", None), ("all_gather", None, None)
    collect, collect_other = kernels.collecting_path(one, runs, True), kernels.collecting_path(other, runs, "handle")
    assert collect is not None
    assert collect_other is not None
    assert collect(1) is True
    assert collect((2,)) is True
    assert collect_other(3, 4) == "handle"
    assert collect_other() == "handle"
    assert collect(5) is True
    assert runs == [(one, [1, (2,)]), (other, [(3, 4), ()]), (one, [5])]


def test_each_thread_has_its_own_and_others_the_fallback() -> None:
    made: list[Any] = []

    def make(key: str) -> Any:
        made.append(key)
        return None if key == "none" else key.upper

    fallback: dict[Any, Any] = {"a": "usual"}
    threads: dict[int, dict[Any, Any]] = {threading.get_ident(): {}}
    paths = paths_of(fallback, threads, make)
    assert paths.get("a")() == "A"
    assert paths.get("a")() == "A"
    assert paths.get("none") is None
    assert paths.get("none") is None
    assert made == ["a", "none", "none"]
    found: list[Any] = []

    def look() -> None:
        found.extend([paths.get("a"), paths.get("b")])
        paths["b"] = "set"
        threads[threading.get_ident()] = {}
        found.append(paths.get("a"))
        del threads[threading.get_ident()]

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found[:2] == ["usual", None]
    assert found[2]() == "A"
    assert made == ["a", "none", "none", "a"]
    assert fallback == {"a": "usual", "b": "set"}
    assert paths.get("b")() == "B"
    threads.clear()
    assert paths.get("b") == "set"
    with pytest.raises(TypeError, match="unhashable"):
        paths.get([])
    with pytest.raises(TypeError, match="not deleted"):
        del paths["b"]  # type: ignore[attr-defined]


def test_the_last_answer_is_forgotten_where_a_thread_begins_or_ends() -> None:
    op = "".join(["m", "ax"])  # of which no other part of the key is a copy
    known: dict[Any, Any] = {}
    threads = {threading.get_ident(): known}
    paths = paths_of({("all_reduce", op, None): "usual"}, threads, lambda key: [key])
    first = paths.get(("all_reduce", op, None))
    assert paths.get(("all_reduce", op, None)) is first
    assert paths.get(("all_reduce", op, None)) is first
    assert paths.get(("all_reduce", "".join(["m", "ax"]), None)) is first
    assert paths.get(("all_reduce", op, 1)) is not first
    assert paths.get(("all_reduce", op)) is not first
    assert paths.get(("all_reduce", op, None)) is first
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(paths.get(("all_reduce", op, None))))
    thread.start()
    thread.join()
    assert found == ["usual"]
    assert paths.get(("all_reduce", op, None)) is first
    threads.clear()
    paths.forget()
    assert paths.get(("all_reduce", op, None)) == "usual"


def test_an_error_in_make_or_in_the_fallback_is_raised() -> None:
    paths = paths_of({}, {threading.get_ident(): {}}, lambda key: 1 / key)
    with pytest.raises(ZeroDivisionError):
        paths.get(0)
    with pytest.raises(AttributeError):
        paths_of(object(), {}, None).get(0)


def test_fallbacks_form_a_chain() -> None:
    inner: dict[Any, Any] = {}
    paths = paths_of(paths_of(inner, {}, None), {}, None)
    paths["a"] = 1
    assert inner == {"a": 1}
    assert paths.get("a") == 1


def hold(runs: list[Any], kept: object) -> None:
    """Make objects that hold each other, ``runs`` and ``kept``."""
    path = kernels.collecting_path("key", runs, kept)
    paths = paths_of({}, {threading.get_ident(): {}}, lambda _: (kept, holder))
    holder = [paths, path]
    runs.append(path)
    paths.get(1)


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
