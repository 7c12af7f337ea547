"""Tensors as the contiguous memory that oneCCL works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["flat", "for_writing", "joined", "spread", "spread_any"]


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


def for_writing(tensor: torch.Tensor, read: bool = False) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Contiguous memory for an output, and how to bring it to where it belongs."""
    if tensor.is_contiguous():
        return tensor, None
    memory = tensor.contiguous() if read else torch.empty(tensor.shape, dtype=tensor.dtype)

    def finish() -> None:
        tensor.copy_(memory)

    return memory, finish


def spread_any(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """:func:`spread` over tensors that need not be dense, element by element."""
    if all(target.is_contiguous() for target in targets):
        spread(source, targets)
        return
    begin = 0
    for target in targets:
        target.copy_(source[begin : begin + target.numel()].view(target.shape))
        begin += target.numel()
