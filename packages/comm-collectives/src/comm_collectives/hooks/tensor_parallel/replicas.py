"""The comparison of parameters of which every rank of a tensor-parallel group has the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from comm_collectives.annotations import Group
from comm_collectives.collectives import all_reduce, broadcast
from comm_collectives.groups import get_process_group_ranks, get_rank, get_world_size
from comm_utils.errors import CollectiveMismatchError
from comm_utils.torch_support import factories

__all__ = ["difference_of_replicas"]


def difference_of_replicas(
    call: str, replicas: Mapping[str, torch.Tensor], group: Group
) -> CollectiveMismatchError | None:
    """Return an error about the first of ``replicas`` that differs between the ranks, on all of them, or None.

    Ranks whose kernels add in another order, as on other devices, differ by rounding. So differences up to the square
    root of the dtype's epsilon, relative to the largest element, are none.

    Args:
        call: the user's call, for messages.
        replicas: tensors by name, with the same names, shapes and dtypes on every rank; only read.
        group: the tensor-parallel group, all of whose ranks call this.
    """
    compared = {name: one.detach() for name, one in replicas.items() if one.numel() and not one.is_meta}
    if get_world_size(group) == 1 or not compared:
        return None
    device = next(iter(compared.values())).device
    found = [_difference(one, group).to(device) for one in compared.values()]
    largest = factories.empty((len(found), 2), dtype=torch.float64, device=device)
    largest.copy_(torch.stack(found))
    all_reduce(largest, "max", group, compression="none")
    for (name, one), (difference, scale) in zip(compared.items(), largest.tolist(), strict=True):
        epsilon = torch.finfo(one.dtype).eps if one.is_floating_point() or one.is_complex() else 0.0
        if difference > math.sqrt(epsilon) * scale:
            module = name.rpartition(".")[0]
            return CollectiveMismatchError(
                f"{call}: parameter {name!r} is not divided, but differs on ranks {get_process_group_ranks(group)} by "
                f"up to {difference:.3g}; expected the same on all of them. If it is used between a 'column' and a "
                f"'row' layer, give {module!r} the style 'summed' in the plan. Else begin with the same weights, pass "
                "the same inputs to all ranks, and clip gradients with handle.clip_grad_norm()"
            )
    return None


def _difference(mine: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the largest difference from the first rank's elements, and the largest element, (2,), float64."""
    if mine.is_floating_point() and mine.itemsize < 4:  # torch does not compute with 8-bit floats
        mine = mine.float()
    first = mine.clone(memory_format=torch.contiguous_format)
    if get_rank(group):
        first.zero_()
    broadcast(first, group=group, group_src=0)
    same = (mine == first) | (mine.isnan() & first.isnan())
    difference = (mine - first).abs().masked_fill(same, 0).amax().nan_to_num(nan=math.inf)
    scale = mine.abs().nan_to_num(nan=0.0, posinf=0.0).amax()
    return torch.stack([difference.double(), scale.double()])
