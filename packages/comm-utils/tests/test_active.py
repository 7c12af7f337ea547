"""The slot of the active backend: empty it says what to do, full it hands out what was put in."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import comm_utils.active
from comm_utils import NotInitializedError, activate, active_backend, deactivate, is_active, slot

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def empty_slot(monkeypatch: Patch) -> Iterator[None]:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "comm_orchestrator" or None)
    deactivate()
    yield
    deactivate()


def test_empty() -> None:
    assert not is_active()
    with pytest.raises(NotInitializedError, match=r"call comm_orchestrator\.init_distributed\(\) first"):
        active_backend()


@pytest.mark.parametrize("name", ["all_reduce", "prepared", "get_rank", "anything"])
def test_whatever_is_asked_of_an_empty_slot_says_what_to_do(name: str) -> None:
    with pytest.raises(NotInitializedError, match=r"not initialised; call comm_orchestrator\.init_distributed\(\)"):
        getattr(slot.backend, name)


@pytest.mark.parametrize(
    ("backends", "remedy"),
    [
        ((), "install a backend with: pip install comm-orchestrator"),
        (("a:provider",), r"pass what a\.provider\.initialize\(setup\) returns to comm_utils\.activate\(\) first"),
        (
            ("b:provider", "a:provider"),
            r"pass what a\.provider\.initialize\(setup\) or b\.provider\.init",
        ),
    ],
)
def test_without_the_orchestrator_the_error_names_what_is_installed(
    monkeypatch: Patch, backends: tuple[str, ...], remedy: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = [SimpleNamespace(value=value) for value in backends]
    monkeypatch.setattr(comm_utils.active, "entry_points", lambda group: found)
    with pytest.raises(NotInitializedError, match=f"not initialised; {remedy}"):
        active_backend()


def test_an_empty_slot_can_be_inspected() -> None:
    # copy, pickle, inspect and the like ask for dunder names and expect AttributeError.
    assert not hasattr(slot.backend, "__wrapped__")
    assert "NoBackend" in repr(slot.backend)


def test_full() -> None:
    first: Any = object()
    second: Any = object()
    activate(first)
    assert is_active()
    assert active_backend() is first
    assert slot.backend is first
    activate(second)
    assert active_backend() is second
    deactivate()
    assert not is_active()
    deactivate()  # once more is fine


def test_the_slot_holds_nothing_else() -> None:
    with pytest.raises(AttributeError):
        slot.world_size = 1  # type: ignore[attr-defined]
