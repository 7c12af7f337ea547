"""Tensors as the contiguous memory that oneCCL works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from comm_utils.torch_support import factories
from comm_utils.torch_support.fast_arguments import are_disjoint
from comm_utils.torch_support.flattening import unflatten

__all__ = ["for_reading", "for_writing", "unflatten_any"]


def for_reading(tensor: torch.Tensor, written: torch.Tensor | None = None, own_slot: int | None = None) -> torch.Tensor:
    """Return contiguous memory with the elements of an input: its own, or a copy.

    Args:
        written: contiguous memory that the operation writes, in which an input must not lie: it would change while it
            is read.
        own_slot: the element of ``written`` at which it may, because what arrives there is the input itself.
    """
    memory = _resolved(tensor).contiguous()
    if written is None or memory is not tensor or are_disjoint(memory, written):
        return memory
    if own_slot is not None and memory.data_ptr() == written.data_ptr() + own_slot * written.element_size():
        return memory
    return memory.detach().view(-1).view(torch.uint8).clone().view(memory.dtype).view(memory.shape)


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether the elements are the negatives or conjugates of what lies in memory."""
    return tensor.is_neg() or tensor.is_conj()


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg() if _is_lazy(tensor) else tensor


def for_writing(tensor: torch.Tensor, read: bool = False) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """Contiguous memory for an output, and how to bring it to where it belongs."""
    if tensor.is_contiguous() and not _is_lazy(tensor):
        return tensor, None
    if read:
        memory = _resolved(tensor).contiguous()
    else:
        memory = factories.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def finish() -> None:
        tensor.copy_(memory)

    return memory, finish


def unflatten_any(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Unflatten into tensors that need not be dense, element by element."""
    if all(target.is_contiguous() and not _is_lazy(target) for target in targets):
        unflatten(source, targets)
        return
    begin = 0
    for target in targets:
        target.copy_(source[begin : begin + target.numel()].view(target.shape))
        begin += target.numel()
