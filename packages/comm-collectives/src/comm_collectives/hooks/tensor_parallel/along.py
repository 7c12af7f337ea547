"""Splitting, gathering and reducing tensors along any dimension."""

from __future__ import annotations

import torch

from comm_collectives.all_gather import all_gather_into_tensor
from comm_collectives.annotations import Group
from comm_collectives.collectives import all_reduce
from comm_collectives.groups import get_rank, get_world_size
from comm_collectives.reduce_scatter import reduce_scatter_tensor
from comm_utils.errors import ArgumentError, ArgumentTypeError

__all__ = [
    "check_divides",
    "check_is_tensor",
    "checked_dim",
    "gathered",
    "own_part",
    "reduced",
    "scattered_sum",
]


def check_is_tensor(call: str, tensor: object) -> None:
    """Check that ``tensor`` is one.

    Raises:
        ArgumentTypeError: it is not.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"{call}: tensor: got {type(tensor).__name__}; expected a tensor")


def checked_dim(call: str, tensor: torch.Tensor, dim: int) -> int:
    """Return ``dim`` counted from 0.

    Raises:
        ArgumentError: ``tensor`` has no such dimension.
        ArgumentTypeError: it is no tensor.
    """
    check_is_tensor(call, tensor)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ArgumentError(
            f"{call}: dim: got {dim}; expected a dimension of the tensor, of shape {tuple(tensor.shape)}"
        )
    return dim % tensor.dim()


def check_divides(call: str, tensor: torch.Tensor, dim: int, group: Group) -> None:
    """Check that the ranks of ``group`` can get equal parts of ``tensor`` along ``dim``.

    Raises:
        ArgumentError: they cannot.
    """
    W = get_world_size(group)
    if tensor.shape[dim] % W:
        raise ArgumentError(
            f"{call}: tensor: got {tensor.shape[dim]} along dimension {dim} of shape {tuple(tensor.shape)}; expected a "
            f"multiple of {W}, the size of the group"
        )


def own_part(tensor: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Return this rank's part of ``tensor``, of W equal ones along ``dim``, in new memory."""
    W = get_world_size(group)
    return tensor.chunk(W, dim)[get_rank(group)].clone(memory_format=torch.contiguous_format)


def gathered(tensor: torch.Tensor, dim: int, group: Group, compression: str | None = None) -> torch.Tensor:
    """Return the ranks' tensors, of one shape, one after the other along ``dim``, in new memory.

    Args:
        tensor: this rank's.
        dim: from 0.
        group: of all these ranks.
        compression: of the call; None is the group's default.
    """
    W = get_world_size(group)
    if W == 1:
        return tensor.detach().clone()
    tensor = tensor.detach().contiguous()
    output = (
        tensor.new_empty((W * tensor.shape[0], *tensor.shape[1:])) if dim == 0 else tensor.new_empty((W, *tensor.shape))
    )
    flat = output.view(W * tensor.shape[0], *tensor.shape[1:]) if dim else output
    all_gather_into_tensor(flat, tensor, group, compression=compression)
    return output if dim == 0 else output.movedim(0, dim).flatten(dim, dim + 1)


def reduced(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of the ranks' tensors in new memory."""
    output = tensor.detach().clone(memory_format=torch.contiguous_format)
    if get_world_size(group) > 1:
        all_reduce(output, "sum", group)
    return output


def scattered_sum(tensor: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Return this rank's part along ``dim`` of the sum of the ranks' tensors, in new memory."""
    W = get_world_size(group)
    if W == 1:
        return tensor.detach().clone()
    parts = torch.stack(tensor.detach().chunk(W, dim))
    output = parts.new_empty(parts.shape[1:])
    reduce_scatter_tensor(output.view(-1), parts.view(-1), "sum", group)
    return output
