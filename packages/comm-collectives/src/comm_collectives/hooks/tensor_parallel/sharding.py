"""Parameters of which each rank of a tensor-parallel group keeps a part, and the whole ones again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from comm_collectives.annotations import Group
from comm_collectives.compression.defaults import no_default
from comm_collectives.groups import get_rank, get_world_size
from comm_collectives.hooks.tensor_parallel.along import gathered
from comm_utils.errors import ArgumentError
from comm_utils.torch_support import factories

__all__ = ["Shard", "check_shard", "replace_data"]


@dataclass(frozen=True)
class Shard:
    """A parameter that is divided along one dimension.

    Attributes:
        name: of the parameter in the model.
        parameter: its data is this rank's part while the hooks are registered.
        dim: the dimension that is divided.
        parts: number of weights that it holds one after the other along ``dim``; each is divided by itself.
    """

    name: str
    parameter: torch.Tensor
    dim: int
    parts: int = 1

    def part_of(self, whole: torch.Tensor, group: Group) -> torch.Tensor:
        """Return this rank's part of ``whole`` in new memory.

        Args:
            whole: a tensor of the parameter's full shape.
            group: the tensor-parallel group.
        """
        W, rank = get_world_size(group), get_rank(group)
        pieces = whole.detach().chunk(self.parts, self.dim)
        return torch.cat([piece.chunk(W, self.dim)[rank] for piece in pieces], self.dim)

    def whole(self, part: torch.Tensor, group: Group) -> torch.Tensor:
        """Return the full tensor; called by all ranks of ``group`` with their parts.

        Args:
            part: this rank's part.
            group: the tensor-parallel group.
        """
        W = get_world_size(group)
        everyones = gathered(part.detach(), self.dim, group, no_default(group)).chunk(W, self.dim)
        pieces = [one.chunk(self.parts, self.dim) for one in everyones]
        return torch.cat([pieces[rank][number] for number in range(self.parts) for rank in range(W)], self.dim)


def check_shard(call: str, shard: Shard, group: Group) -> None:
    """Check that the ranks can get equal parts of a parameter.

    Raises:
        ArgumentError: they cannot.
    """
    W, size = get_world_size(group), shard.parameter.shape[shard.dim]
    if size % (W * shard.parts):
        parts = f" times {shard.parts} parts" if shard.parts > 1 else ""
        raise ArgumentError(
            f"{call}: parameter {shard.name!r} has {size} along dimension {shard.dim} of shape "
            f"{tuple(shard.parameter.shape)}; expected a multiple of {W} ranks{parts}; pad it before"
        )


def replace_data(parameter: torch.Tensor, data: torch.Tensor) -> None:
    """Let ``parameter`` have other elements in another shape, and no gradient.

    Args:
        parameter: stays the same object.
        data: of its dtype and device; used as it is.
    """
    parameter.grad = None
    # A graph that is alive, such as that of an earlier loss, keeps a node that expects gradients of the old shape. A
    # change of the dtype makes torch forget this node, a change of the shape does not.
    other = torch.float32 if parameter.dtype != torch.float32 else torch.float64
    parameter.data = factories.empty(0, dtype=other, device=parameter.device)
    parameter.data = data
