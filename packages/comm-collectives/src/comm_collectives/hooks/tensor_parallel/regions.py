"""The four functions of tensor parallelism: copy, reduce, gather and scatter.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019, section
3.
In the tensor-parallel region of a model, each rank of the group computes with its part of a layer. Each function is the
backward pass of another one, so gradients of gradients work as well. Under ``torch.compile`` the graph breaks at them.
"""

from __future__ import annotations

from typing import Any

import torch

from comm_collectives.annotations import Group
from comm_collectives.collective import collective
from comm_collectives.hooks.apply import apply
from comm_collectives.hooks.tensor_parallel.along import (
    check_divides,
    check_is_tensor,
    checked_dim,
    gathered,
    own_part,
    reduced,
)

__all__ = [
    "Gather",
    "Scatter",
    "copy_to_tensor_parallel_region",
    "gather_from_tensor_parallel_region",
    "reduce_from_tensor_parallel_region",
    "scatter_to_tensor_parallel_region",
]


@collective(labels=False)
def copy_to_tensor_parallel_region(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return ``tensor``, whose gradient is the sum of the ranks' gradients.

    It stands before a column-parallel layer. The result shares the memory of ``tensor``, and torch refuses to change it
    in place where it requires a gradient, as in Megatron-LM; ``clone()`` it before.

    Args:
        tensor: any shape, float, the same on every rank; only read.
        group: the tensor-parallel group; None is the world group.
    """
    check_is_tensor("copy_to_tensor_parallel_region", tensor)
    result: torch.Tensor = apply(_Copy, tensor, group)
    return result


@collective(labels=False)
def reduce_from_tensor_parallel_region(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the sum of the ranks' tensors; its gradient goes back to every rank unchanged.

    It stands behind a row-parallel layer.

    Args:
        tensor: any float dtype, the same shape on every rank; only read.
        group: the tensor-parallel group; None is the world group.
    """
    check_is_tensor("reduce_from_tensor_parallel_region", tensor)
    result: torch.Tensor = apply(_Reduce, tensor, group)
    return result


@collective(labels=False)
def gather_from_tensor_parallel_region(tensor: torch.Tensor, group: Group = None, dim: int = -1) -> torch.Tensor:
    """Return the ranks' tensors one after the other along ``dim``; each rank keeps its part of the gradient.

    Args:
        tensor: the same shape and dtype on every rank; only read.
        group: the tensor-parallel group; None is the world group.
        dim: the dimension that is divided among the ranks.
    """
    result: torch.Tensor = apply(Gather, tensor, group, checked_dim("gather_from_tensor_parallel_region", tensor, dim))
    return result


@collective(labels=False)
def scatter_to_tensor_parallel_region(tensor: torch.Tensor, group: Group = None, dim: int = -1) -> torch.Tensor:
    """Return this rank's part of ``tensor`` along ``dim``; its gradient is the ranks' gradients, gathered.

    Args:
        tensor: the same on every rank; the group's size divides it along ``dim``; only read.
        group: the tensor-parallel group; None is the world group.
        dim: the dimension to divide.
    """
    call = "scatter_to_tensor_parallel_region"
    dim = checked_dim(call, tensor, dim)
    check_divides(call, tensor, dim, group)
    result: torch.Tensor = apply(Scatter, tensor, group, dim)
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return apply(_Reduce, gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return reduced(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return apply(_Copy, gradient, ctx.group), None


class Gather(torch.autograd.Function):
    """The ranks' tensors, of whose gradient, the same on every rank, each keeps its part."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return gathered(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return apply(Scatter, gradient, ctx.group, ctx.dim), None, None


class Scatter(torch.autograd.Function):
    """The part of this rank; the gradient is the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return own_part(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return apply(Gather, gradient, ctx.group, ctx.dim), None, None
