"""Distributed communication for PyTorch: one call to set it up anywhere, one API to use it.

import comm_orchestrator as dist

dist.init_distributed()
dist.all_reduce(tensor)

Names that are not here but in ``torch.distributed`` are handed on as they are.
"""

from typing import TYPE_CHECKING, Any

import torch.distributed

from comm_orchestrator import facade

if TYPE_CHECKING:
    # Type checkers see torch's names one by one: with a __getattr__ they would accept any name, misspelt ones too.
    from torch.distributed import *  # noqa: F403

from comm_orchestrator.facade import *  # noqa: F403

__all__ = facade.__all__

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if not name.startswith("_") and hasattr(torch.distributed, name):
            return getattr(torch.distributed, name)
        handed_on = "" if name.startswith("_") else ", and torch.distributed has none"
        raise AttributeError(f"module 'comm_orchestrator' has no attribute {name!r}{handed_on}")
