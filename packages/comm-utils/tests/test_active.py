"""The slot of the active backend: empty it says what to do, full it hands out what was put in."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from comm_utils import NotInitializedError, activate, active_backend, deactivate, is_active, slot
from comm_utils.fast_path import FastPathCache


@pytest.fixture(autouse=True)
def empty_slot() -> Iterator[None]:
    deactivate()
    yield
    deactivate()


def test_empty() -> None:
    assert not is_active()
    with pytest.raises(NotInitializedError, match=r"call comm_orchestrator\.init_distributed\(\) first"):
        active_backend()


@pytest.mark.parametrize("name", ["all_reduce", "fast_paths", "get_rank", "anything"])
def test_whatever_is_asked_of_an_empty_slot_says_what_to_do(name: str) -> None:
    with pytest.raises(NotInitializedError, match=r"not initialised; call comm_orchestrator\.init_distributed\(\)"):
        getattr(slot.backend, name)


def test_an_empty_slot_can_be_inspected() -> None:
    # copy, pickle, inspect and the like ask for dunder names and expect AttributeError.
    assert not hasattr(slot.backend, "__wrapped__")
    assert "NoBackend" in repr(slot.backend)


def test_full() -> None:
    first: Any = SimpleNamespace(fast_paths=FastPathCache())
    second: Any = object()
    activate(first)
    assert is_active()
    assert active_backend() is first
    assert slot.backend is first
    assert slot.fast_paths is first.fast_paths
    activate(second)
    assert active_backend() is second
    deactivate()
    assert not is_active()
    deactivate()  # once more is fine


def test_the_slot_holds_nothing_else() -> None:
    with pytest.raises(AttributeError):
        slot.world_size = 1  # type: ignore[attr-defined]
