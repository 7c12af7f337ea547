"""A typed call of an autograd function."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["apply"]


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return ``function.apply(*arguments)``, which torch does not annotate."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]
