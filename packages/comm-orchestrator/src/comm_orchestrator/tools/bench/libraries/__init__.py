"""The libraries that are measured side by side: ours through its facade, and peers."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from comm_orchestrator.tools.bench.libraries.contract import Group, Library, UnsupportedError

__all__ = ["Group", "Library", "UnsupportedError", "open_library", "register"]

#: name -> ``module:function``, which is called with the backend (that of ours; peers choose their own) and the group.
_MAKERS: dict[str, str | Callable[[str, Group], Library]] = {
    "ours": "comm_orchestrator.tools.bench.libraries.torch_like:open_ours",
    "torch": "comm_orchestrator.tools.bench.libraries.torch_like:open_torch",
    "deepspeed": "comm_orchestrator.tools.bench.libraries.torch_like:open_deepspeed",
    "mpi4py": "comm_orchestrator.tools.bench.libraries.peer_mpi4py:open_mpi4py",
}


def register(name: str, maker: Callable[[str, Group], Library]) -> None:
    """Add a library, or replace one, for this process."""
    _MAKERS[name] = maker


def open_library(name: str, backend: str, group: Group) -> Library:
    """Set ``name`` up; called by all ranks in the same order."""
    maker = _MAKERS[name]
    if isinstance(maker, str):
        module, _, function = maker.partition(":")
        maker = getattr(importlib.import_module(module), function)
    return maker(backend, group)
