"""Names under which callers want some of their calls recorded: DeepSpeed's ``log_name`` and ``prof``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

__all__ = ["NO_LABEL", "Label", "label", "labelled"]

#: The name to record under, or None, and whether to record whatever the logger's settings say.
Label: TypeAlias = "tuple[str | None, bool]"

NO_LABEL: Label = (None, False)
#: Of the calls that are made now.
label: ContextVar[Label] = ContextVar("comm_label", default=NO_LABEL)


@contextmanager
def labelled(log_name: str | None = None, prof: bool = False) -> Iterator[None]:
    """Record what is communicated meanwhile under ``log_name``; with ``prof`` whatever the logger's settings say."""
    token = label.set((log_name, prof))
    try:
        yield
    finally:
        label.reset(token)
