"""The backend under its name in ``torch.distributed``."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as c10d

from comm_backend_ccl.process_group import NAME, CclProcessGroup

__all__ = ["register", "unavailable_reason"]

# Intel's discontinued bindings, which register the same name.
_BINDINGS = "oneccl_bindings_for_pytorch"


def register() -> None:
    """Make ``"ccl"`` a backend of ``torch.distributed`` for CPU tensors, unless the name is taken; again is a no-op."""
    if c10d.Backend._plugins.get(NAME.upper()) is None:
        c10d.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def unavailable_reason() -> tuple[str, str] | None:
    """Return which other library has registered the name, and the remedy; None where none has."""
    known = c10d.Backend._plugins.get(NAME.upper())
    if known is None or known.creator_fn is _create:
        return None
    # Functions of a C++ extension may have no module.
    module = getattr(known.creator_fn, "__module__", None) or ("" if _BINDINGS not in sys.modules else _BINDINGS)
    library = module.partition(".")[0] or "another library"
    remedy = f"start a process that does not import {library}"
    if library == _BINDINGS:
        remedy += f", or use {library} by that name"
    return f"{library} has registered {NAME!r} with torch.distributed in this process", remedy


def _create(options: Any, _: Any = None) -> CclProcessGroup:
    ranks = options.global_ranks_in_group or None
    if ranks is None and c10d.is_initialized():  # other code makes a group of processes of several worlds
        ranks = range(options.group_size)
    return CclProcessGroup(options.store, options.group_rank, options.group_size, options.timeout, ranks)
