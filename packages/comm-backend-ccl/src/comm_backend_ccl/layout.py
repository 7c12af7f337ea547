"""Tensors as the contiguous memory that oneCCL works on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["flat", "joined", "spread"]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory, without a copy."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of dense tensors of one dtype, one after the other."""
    return torch.cat([flat(tensor) for tensor in tensors])


def spread(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Overwrite dense tensors with consecutive parts of ``source``."""
    begin = 0
    for target in targets:
        flat(target).copy_(source[begin : begin + target.numel()])
        begin += target.numel()
