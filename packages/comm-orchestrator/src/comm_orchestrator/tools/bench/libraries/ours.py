"""This project, through the API that users call."""

from __future__ import annotations

import sys

from comm_orchestrator import facade
from comm_orchestrator.tools.bench.libraries.contract import Group
from comm_orchestrator.tools.bench.libraries.torch_like import TorchLike

__all__ = ["open_ours"]


def open_ours(backend: str, group: Group) -> TorchLike:
    """Our collectives on ``backend``: on the world itself where that is what it runs on."""
    # The same object as in a program's source, by which the facade knows that it was checked before.
    op_of = sys.intern
    if group.is_world and backend == facade.get_backend():
        return TorchLike("ours", backend, facade, group, None, op_of)
    handle = facade.new_group(group.members, backend=backend)
    return TorchLike("ours", backend, facade, group, handle, op_of, lambda: facade.destroy_process_group(handle))
