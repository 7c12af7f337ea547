"""Settings of hooks that are stored before there is a model, for the call that has one."""

from __future__ import annotations

from typing import Any

__all__ = [
    "DATA_PARALLEL",
    "MODEL_PARALLEL",
    "STAGE",
    "forget_settings",
    "has_settings",
    "store_settings",
    "stored_settings",
]

#: Kinds of hooks that settings are stored for, and the stage of sharding that comes with those of the first.
DATA_PARALLEL, MODEL_PARALLEL, STAGE = "data-parallel", "model-parallel", "stage"

_stored: dict[str, Any] = {}


def store_settings(kind: str, settings: Any) -> None:
    """Keep ``settings`` for the hooks of ``kind`` that are registered without any, instead of what was kept before."""
    _stored[kind] = settings


def stored_settings(kind: str) -> Any:
    """Return what was stored for ``kind``; None for nothing."""
    return _stored.get(kind)


def has_settings() -> bool:
    """Return whether anything was stored."""
    return bool(_stored)


def forget_settings() -> None:
    """Forget what was stored, as at the end of a world."""
    _stored.clear()
