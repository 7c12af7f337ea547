"""The backend under its name in ``torch.distributed``."""

from __future__ import annotations

from typing import Any

import torch.distributed as c10d

from comm_backend_ccl.process_group import NAME, CclProcessGroup
from comm_utils.errors import BackendUnavailableError

__all__ = ["register", "unregister"]


def register() -> None:
    """Make ``"ccl"`` a backend of ``torch.distributed`` for CPU tensors; again is a no-op.

    Raises:
        BackendUnavailableError: another library has taken the name.
    """
    known = c10d.Backend._plugins.get(NAME.upper())
    if known is not None and known.creator_fn is not _create:
        raise BackendUnavailableError(
            f"backend {NAME!r} of torch.distributed was registered by {known.creator_fn.__module__}; "
            "import comm_orchestrator before it, or do without it"
        )
    if known is None:
        c10d.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def unregister() -> None:
    """Give the name ``"ccl"`` back, for another library that registers it."""
    backend: Any = c10d.Backend
    if backend._plugins.get(NAME.upper()) is None or backend._plugins[NAME.upper()].creator_fn is not _create:
        return
    del backend._plugins[NAME.upper()]
    delattr(backend, NAME.upper())
    backend.backend_list.remove(NAME)
    for table in (backend.backend_capability, backend.backend_type_map):
        table.pop(NAME, None)


def _create(options: Any, _: Any = None) -> CclProcessGroup:
    return CclProcessGroup(
        options.store, options.group_rank, options.group_size, options.timeout, options.global_ranks_in_group or None
    )
