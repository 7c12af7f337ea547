"""Parameters and buffers that all ranks take from the first rank of a group."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from comm_collectives.annotations import Group
from comm_collectives.collectives import broadcast
from comm_collectives.memory import as_bytes, contiguous_elements, copyable

__all__ = ["broadcast_tensors"]

# What is flattened at a time.
_PIECE_BYTES = 64 << 20


def broadcast_tensors(
    tensors: Iterable[torch.Tensor], group: Group = None, noticed: Collection[int] = frozenset()
) -> None:
    """Overwrite ``tensors`` with those of the first rank of ``group``, in few messages.

    Args:
        tensors: of the same shapes, dtypes and order on every rank; any strides, 0 included. Autograd does not notice
            that they are written, except for those in ``noticed``.
        group: this rank is a member; None is the world group.
        noticed: ids of tensors that are written only where the first rank has other bits; a graph that saved one then
            raises in its backward.
    """
    pieces: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    sizes_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        pieces.setdefault(kind, []).append(tensor)
        sizes_bytes[kind] = sizes_bytes.get(kind, 0) + tensor.nbytes
        if sizes_bytes[kind] >= _PIECE_BYTES:
            del sizes_bytes[kind]
            _broadcast(pieces.pop(kind), group, noticed)
    for piece in pieces.values():
        _broadcast(piece, group, noticed)


def _broadcast(piece: list[torch.Tensor], group: Group, noticed: Collection[int]) -> None:
    flat = torch.cat([contiguous_elements(one.detach()) for one in piece]) if len(piece) > 1 else None
    if flat is None:
        flat = contiguous_elements(piece[0].detach()).clone()
    broadcast(flat, None, group, group_src=0)
    watched: list[tuple[torch.Tensor, torch.Tensor]] = []
    for one, part in zip(piece, torch.split(flat, [one.numel() for one in piece]), strict=True):
        if id(one) in noticed:
            watched.append((one, part))
        else:
            _write(one.data, part)  # .data: the version counter stays as it is
    for (one, part), differs in zip(watched, _differing(watched), strict=True):
        if differs:
            _write(one.detach(), part)


def _write(tensor: torch.Tensor, elements: torch.Tensor) -> None:
    values = elements.view(tensor.shape)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:  # expanded: one place in memory for all of them
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    copyable(tensor).copy_(copyable(values))


def _differing(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Return in which pairs bits differ; a device is waited for once."""
    in_bytes = [
        (as_bytes(contiguous_elements(one.detach()), frozenset()), as_bytes(first, frozenset())) for one, first in pairs
    ]
    if not pairs or pairs[0][0].device.type == "cpu":
        return [not torch.equal(mine, first) for mine, first in in_bytes]
    return torch.stack([(mine != first).any() for mine, first in in_bytes]).tolist()
