"""``deepspeed.comm``'s functions, on the same kind of group as ``torch.distributed``'s."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from comm_orchestrator import facade
from comm_orchestrator.tools.bench.libraries.contract import Group
from comm_orchestrator.tools.bench.libraries.peer_torch import backend_of, make_group
from comm_orchestrator.tools.bench.libraries.torch_like import TorchLike

__all__ = ["open_deepspeed"]


def open_deepspeed(backend: str, group: Group) -> TorchLike:
    """DeepSpeed on the ``torch.distributed`` that is set up already, as it does in a training program."""
    deepspeed: Any = importlib.import_module("deepspeed.comm")
    # It calls torch by names that torch has replaced, which is nothing that who measures could change.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    chosen = backend_of(backend)
    deepspeed.init_distributed(dist_backend=chosen, verbose=False)
    handle = make_group(group, chosen)
    return TorchLike(
        "deepspeed",
        chosen,
        deepspeed,
        group,
        handle,
        lambda name: getattr(deepspeed.ReduceOp, name.upper()),
        lambda: facade.destroy_process_group(handle),
    )
