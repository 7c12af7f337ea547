"""Parameters and buffers that all ranks take from the first rank of a group."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from comm_collectives.annotations import Group
from comm_collectives.collectives import broadcast
from comm_collectives.memory import contiguous_elements, copyable

__all__ = ["broadcast_tensors"]

# What is flattened at a time.
_PIECE_BYTES = 64 << 20


def broadcast_tensors(tensors: Iterable[torch.Tensor], group: Group = None) -> None:
    """Overwrite ``tensors`` with those of the first rank of ``group``, in few messages.

    Args:
        tensors: of the same shapes, dtypes and order on every rank; any strides. Autograd does not notice that they
            are written.
        group: this rank is a member; None is the world group.
    """
    pieces: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    sizes_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        pieces.setdefault(kind, []).append(tensor)
        sizes_bytes[kind] = sizes_bytes.get(kind, 0) + tensor.nbytes
        if sizes_bytes[kind] >= _PIECE_BYTES:
            del sizes_bytes[kind]
            _broadcast(pieces.pop(kind), group)
    for piece in pieces.values():
        _broadcast(piece, group)


def _broadcast(piece: list[torch.Tensor], group: Group) -> None:
    flat = torch.cat([contiguous_elements(one.detach()) for one in piece]) if len(piece) > 1 else None
    if flat is None:
        flat = contiguous_elements(piece[0].detach()).clone()
    broadcast(flat, None, group, group_src=0)
    for one, part in zip(piece, torch.split(flat, [one.numel() for one in piece]), strict=True):
        copyable(one.data).copy_(copyable(part.view(one.shape)))  # .data: the version counter stays as it is
