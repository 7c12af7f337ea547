"""The step between hosts of a hierarchical collective."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from comm_collectives import reduction
from comm_collectives.hierarchy.plan import Plan
from comm_collectives.memory import as_bytes
from comm_utils.backend import Backend, Work
from comm_utils.reduce_op import ReduceOp

__all__ = ["Between", "gather"]


class Between:
    """Exchanges shares among the ranks of the same position on every host, as they are.

    Each method returns a handle where it has only started; then its tensors stay alive until that is complete.

    Attributes:
        piece_bytes: of a tensor on one host that is worth an exchange; None for what hierarchical collectives take.
        waits: methods return when they are complete.
        sum_dtype: of the shares of a reduction; None for that of the tensor.
    """

    piece_bytes: int | None = None
    waits = False
    sum_dtype: torch.dtype | None = None

    def __init__(self, backend: Backend, plan: Plan) -> None:
        self._backend, self._plan = backend, plan

    def all_reduce(self, share: torch.Tensor, op: ReduceOp) -> Work | None:
        """Overwrite ``share``, (n,), with its reduction over all hosts."""
        return reduction.all_reduce(self._backend, share, op, self._plan.between, True)

    def reduce_scatter(self, output: torch.Tensor, share: torch.Tensor, op: ReduceOp) -> Work | None:
        """Overwrite ``output``, (n,), with this host's part of the reduction of ``share``, (hosts * n,)."""
        return reduction.reduce_scatter_tensor(self._backend, output, share, op, self._plan.between, True)

    def all_gather(self, share: torch.Tensor, own: torch.Tensor) -> Work | None:
        """Overwrite ``share``, (hosts * n,), with every host's ``own``, (n,)."""
        return gather(self._backend, self._plan.between, share, own, True)


def gather(
    backend: Backend, group: ProcessGroup, output: torch.Tensor, input: torch.Tensor, async_op: bool
) -> Work | None:
    """Do ``all_gather_into_tensor`` on the bytes of tensors of any dtype."""
    native = backend.capabilities(group, input.device.type).dtypes
    return backend.all_gather_into_tensor(as_bytes(output, native), as_bytes(input, native), group, async_op)
