"""Sequence parallelism: between tensor-parallel layers, each rank holds its part of the sequence.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2. All-gather and
reduce-scatter along the sequence take the place of copy and reduce, and send as many bytes. Parameters between the
layers, such as those of norms, see a part of the sequence on each rank: their gradients are to be summed over the group
(:func:`sum_gradients`). Under ``torch.compile`` the graph breaks at these functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from comm_collectives.annotations import Group
from comm_collectives.collective import collective
from comm_collectives.hooks.apply import apply
from comm_collectives.hooks.tensor_parallel.along import (
    check_divides,
    checked_dim,
    gathered,
    reduced,
    scattered_sum,
)
from comm_collectives.hooks.tensor_parallel.regions import Gather, Scatter

__all__ = [
    "gather_from_sequence_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "sum_gradients",
]


@collective(labels=False)
def scatter_to_sequence_parallel_region(tensor: torch.Tensor, group: Group = None, dim: int = 0) -> torch.Tensor:
    """Return this rank's part of the sequence; its gradient is the ranks' gradients, gathered.

    Args:
        tensor: the same on every rank; the group's size divides it along ``dim``; only read.
        group: the tensor-parallel group; None is the world group.
        dim: the dimension of the sequence.
    """
    call = "scatter_to_sequence_parallel_region"
    dim = checked_dim(call, tensor, dim)
    check_divides(call, tensor, dim, group)
    result: torch.Tensor = apply(Scatter, tensor, group, dim)
    return result


@collective(labels=False)
def gather_from_sequence_parallel_region(
    tensor: torch.Tensor, group: Group = None, dim: int = 0, tensor_parallel_output_grad: bool = True
) -> torch.Tensor:
    """Return the whole sequence, whose gradient is summed over the ranks and scattered.

    Args:
        tensor: this rank's part, the same shape on every rank; only read.
        group: the tensor-parallel group; None is the world group.
        dim: the dimension of the sequence.
        tensor_parallel_output_grad: False where what follows is no tensor-parallel layer but the same computation on
            every rank; each rank then keeps its part of the gradient.
    """
    dim = checked_dim("gather_from_sequence_parallel_region", tensor, dim)
    function = _GatherForLayer if tensor_parallel_output_grad else Gather
    result: torch.Tensor = apply(function, tensor, group, dim)
    return result


@collective(labels=False)
def reduce_scatter_to_sequence_parallel_region(tensor: torch.Tensor, group: Group = None, dim: int = 0) -> torch.Tensor:
    """Return this rank's part of the sequence of the sum of the ranks' tensors; its gradient is gathered.

    Args:
        tensor: the same shape and float dtype on every rank; the group's size divides it along ``dim``; only read.
        group: the tensor-parallel group; None is the world group.
        dim: the dimension of the sequence.
    """
    call = "reduce_scatter_to_sequence_parallel_region"
    dim = checked_dim(call, tensor, dim)
    check_divides(call, tensor, dim, group)
    result: torch.Tensor = apply(_ReduceScatter, tensor, group, dim)
    return result


def sum_gradients(parameters: Iterable[torch.Tensor], group: Group = None) -> list[RemovableHandle]:
    """Sum the gradients of ``parameters`` over ``group`` in every backward pass; return what removes this again.

    Args:
        parameters: those that see a part of the sequence on each rank; the same order of use on every rank.
        group: the tensor-parallel group; None is the world group.
    """

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        return reduced(gradient, group)

    # Runs once for each backward pass, before the gradient is added to .grad, so accumulation works.
    return [one.register_hook(hook) for one in parameters]  # type: ignore[no-untyped-call]


class _GatherForLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return gathered(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return apply(_ReduceScatter, gradient, ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return scattered_sum(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return apply(_GatherForLayer, gradient, ctx.group, ctx.dim), None, None
