"""``torch.distributed``'s own functions, on a group of its own: NCCL for CUDA, gloo for CPU tensors."""

from __future__ import annotations

from typing import Any

import torch.distributed as c10d

from comm_orchestrator import facade
from comm_orchestrator.tools.bench.libraries.contract import Group
from comm_orchestrator.tools.bench.libraries.torch_like import TorchLike

__all__ = ["backend_of", "make_group", "op_of", "open_torch"]


def backend_of(ours: str) -> str:
    """What torch uses for the tensors that ``ours`` takes."""
    return ours if ours in ("nccl", "xccl") else "gloo"


def make_group(group: Group, backend: str) -> Any:
    """This rank's group; torch wants all ranks to make all of them."""
    made = [c10d.new_group(members, backend=backend) for members in group.all_members]
    return made[group.all_members.index(group.members)]


def op_of(name: str) -> Any:
    return getattr(c10d.ReduceOp, name.upper())


def open_torch(backend: str, group: Group) -> TorchLike:
    """``torch.distributed`` beside ``backend`` of ours."""
    chosen = backend_of(backend)
    handle = make_group(group, chosen)
    return TorchLike("torch", chosen, c10d, group, handle, op_of, lambda: facade.destroy_process_group(handle))
