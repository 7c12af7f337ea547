"""Load the provider that the conformance suite tests."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import cast

from comm_utils.backend import ENTRY_POINT_GROUP, BackendProvider

__all__ = ["load_provider"]


def load_provider(named: str) -> BackendProvider:
    """Return the provider that an entry point with the value ``named`` has: a module, or an attribute of one."""
    return cast(BackendProvider, EntryPoint("tested", named, ENTRY_POINT_GROUP).load())
