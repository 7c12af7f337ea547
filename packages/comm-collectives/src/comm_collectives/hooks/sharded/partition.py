"""Equal parts of tensors whose elements do not divide by the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from comm_collectives.all_gather import all_gather_into_tensor
from comm_collectives.annotations import Group
from comm_collectives.arguments import check_numel, check_tensor, enter, integer
from comm_collectives.compression.defaults import no_default
from comm_collectives.groups import get_rank, get_world_size
from comm_collectives.memory import contiguous_elements
from comm_utils.errors import ArgumentError
from comm_utils.torch_support import factories

__all__ = ["partition", "partition_range", "unpartition"]


def partition_range(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first element of the part of ``rank``, and the one after its last.

    Every part has ``ceil(numel / world_size)`` elements, except that the last ones are shorter or empty, as those of
    ``torch.chunk``.

    Args:
        numel: elements of the whole.
        rank: the owner of the part, 0 to ``world_size - 1``.
        world_size: the number of parts.

    Raises:
        ArgumentError: a number is out of range.
    """
    if numel < 0:
        raise ArgumentError(f"partition_range: numel: got {numel}; expected 0 or more elements")
    if world_size < 1:
        raise ArgumentError(f"partition_range: world_size: got {world_size}; expected at least 1 rank")
    if not 0 <= rank < world_size:
        raise ArgumentError(f"partition_range: rank: got {rank}; expected 0 to {world_size - 1}")
    size = -(-numel // world_size)
    return min(rank * size, numel), min((rank + 1) * size, numel)


def partition(tensor: torch.Tensor, group: Group = None) -> torch.Tensor | None:
    """Return this rank's part of ``tensor``; nothing is sent.

    Args:
        tensor: any shape, dtype and device, the same on every rank; only read.
        group: whose ranks own a part each; None is the world group.

    Returns:
        ``(ceil(n / W),)`` for the n elements of ``tensor`` and W ranks, a copy, padded with zeros where n does not
        divide by W; None on a rank outside ``group``.

    Raises:
        ArgumentError: ``tensor`` has no dense memory.
    """
    backend = enter("partition", group)
    if backend is None:
        return None
    check_tensor("partition", "tensor", tensor, backend, group)
    rank, world_size = get_rank(group), get_world_size(group)
    begin, end = partition_range(tensor.numel(), rank, world_size)
    part = factories.zeros(-(-tensor.numel() // world_size), dtype=tensor.dtype, device=tensor.device)
    part[: end - begin].copy_(contiguous_elements(tensor)[begin:end])
    return part


def unpartition(part: torch.Tensor, shape: int | Sequence[int], group: Group = None) -> torch.Tensor | None:
    """Return the tensor of which every rank has the part that :func:`partition` gave to it.

    Parts travel as they are, whatever the default compression of ``group``.

    Args:
        part: ``(ceil(n / W),)``, any dtype and device, the same size on every rank; only read.
        shape: that of the whole, of n elements.
        group: as for :func:`partition`.

    Returns:
        A new tensor of ``shape``; None on a rank outside ``group``.

    Raises:
        ArgumentError: ``part`` does not have the size of a part of ``shape``.
    """
    backend = enter("unpartition", group)
    if backend is None:
        return None
    check_tensor("unpartition", "part", part, backend, group)
    sizes = [shape] if isinstance(shape, int) else list(shape)
    sizes = [integer("unpartition", "shape", size) for size in sizes]
    if any(size < 0 for size in sizes):
        raise ArgumentError(f"unpartition: shape: got {tuple(sizes)}; expected sizes of 0 and above")
    numel, world_size = prod(sizes), get_world_size(group)
    expected = -(-numel // world_size)
    check_numel("unpartition", "part", part, expected, f"{numel} elements of shape over {world_size} ranks, rounded up")
    whole = factories.empty(world_size * expected, dtype=part.dtype, device=part.device)
    all_gather_into_tensor(whole, part, group, compression=no_default(group))
    return whole[:numel].view(sizes)
