"""Tensors as the contiguous memory that oneCCL works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from comm_utils.torch_support.flattening import unflatten

__all__ = ["for_writing", "unflatten_any"]


def for_writing(tensor: torch.Tensor, read: bool = False) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Contiguous memory for an output, and how to bring it to where it belongs."""
    if tensor.is_contiguous():
        return tensor, None
    memory = tensor.contiguous() if read else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def finish() -> None:
        tensor.copy_(memory)

    return memory, finish


def unflatten_any(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Unflatten into tensors that need not be dense, element by element."""
    if all(target.is_contiguous() for target in targets):
        unflatten(source, targets)
        return
    begin = 0
    for target in targets:
        target.copy_(source[begin : begin + target.numel()].view(target.shape))
        begin += target.numel()
