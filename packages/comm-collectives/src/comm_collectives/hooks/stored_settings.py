"""Settings of hooks that are stored before there is a model, for the call that has one."""

from __future__ import annotations

from typing import Any

__all__ = ["DATA_PARALLEL", "MODEL_PARALLEL", "forget_settings", "store_settings", "stored_settings"]

#: Kinds of hooks that settings are stored for.
DATA_PARALLEL, MODEL_PARALLEL = "data-parallel", "model-parallel"

_stored: dict[str, Any] = {}


def store_settings(kind: str, settings: Any) -> None:
    """Keep ``settings`` for the hooks of ``kind`` that are registered without any, instead of what was kept before."""
    _stored[kind] = settings


def stored_settings(kind: str) -> Any:
    """Return what was stored for ``kind``; None for nothing."""
    return _stored.get(kind)


def forget_settings() -> None:
    """Forget what was stored, as at the end of a world."""
    _stored.clear()
