"""Graphs of autograd that save parameters whose memory is replaced before the backward (stage 3)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from comm_collectives.hooks.sharded.flat_shard import FlatShard

__all__ = ["keep_saved_values"]


def keep_saved_values(flats: Iterable[FlatShard]) -> AbstractContextManager[Any]:
    """Have graphs that are made within save the memory that tensors have now, and keep it.

    A graph saves a parameter itself, as for a penalty on it: its backward would read what the parameter has then.

    Args:
        flats: gathered; those of which a graph saves memory leave it to the graph.
    """
    by_memory = {flat.full.untyped_storage()._cdata: flat for flat in flats}

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        if tensor.layout is torch.strided:
            flat = by_memory.get(tensor.untyped_storage()._cdata)
            if flat is not None:
                flat.is_saved = True
        return tensor.detach(), tensor._version

    return saved_tensors_hooks(pack, _unpack)


def _unpack(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = saved
    if tensor._version != version:  # torch checks it only where there are no such hooks
        raise RuntimeError(
            "backward: one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"one of shape {tuple(tensor.shape)}, which a forward within full_parameters() saved, is at version "
            f"{tensor._version}; expected version {version}: run the backward before parameters are changed"
        )
    return tensor
