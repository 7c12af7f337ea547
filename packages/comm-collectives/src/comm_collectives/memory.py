"""One-dimensional views of a tensor's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

__all__ = [
    "StagingBuffer",
    "are_disjoint",
    "as_bytes",
    "contiguous_elements",
    "copy_back",
    "copy_if_overlapping",
    "is_dense",
    "memory_view",
    "overlapping",
]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a block of memory without gap or overlap, in any order (as channels_last)."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def memory_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's memory as one dimension, sharing it, in the order of the memory."""
    if tensor.dim() == 1 and tensor.stride(0) == 1 and not tensor.requires_grad:
        return tensor
    # Not view(-1): it keeps the stride of a dimension of one or no element, and then refuses to be viewed as bytes.
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def contiguous_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in their logical order as one dimension.

    Copied only where they do not lie in memory like that.
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return memory_view(tensor)


def as_bytes(tensor: torch.Tensor, native: frozenset[torch.dtype]) -> torch.Tensor:
    """Return a one-dimensional tensor, as it is if its dtype is one of ``native``, else its memory as uint8."""
    return tensor if tensor.dtype in native else tensor.view(torch.uint8)


class StagingBuffer:
    """A staging buffer into which a backend writes the elements of ``tensor`` in logical order.

    Attributes:
        memory: (n,), to be given to the backend; the tensor's own memory where that can be, else private memory.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        # c10d, which copies for some calls, cannot write tensors of the inference mode outside of it; copy_back() can.
        writable = not tensor.is_inference() or torch.is_inference_mode_enabled()
        self._direct = tensor.is_contiguous() and writable
        self.memory = (
            memory_view(tensor)
            if self._direct
            else torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        )

    def copy_back(self) -> None:
        """Copy from private memory into the tensor, if it was needed."""
        if not self._direct:
            self._tensor.detach().copy_(self.memory.view(self._tensor.shape))


def copy_back(buffers: list[StagingBuffer]) -> Callable[[], None] | None:
    """Return the function that copies back; None where the backend wrote in place everywhere."""
    indirect = [buffer for buffer in buffers if not buffer._direct]
    if not indirect:
        return None

    def finish() -> None:
        for buffer in indirect:
            buffer.copy_back()

    return finish


def are_disjoint(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two contiguous tensors of one device share no memory."""
    start, first = one.data_ptr(), other.data_ptr()
    return start + one.nbytes <= first or first + other.nbytes <= start


def copy_if_overlapping(source: torch.Tensor, written: torch.Tensor, own_slot: int | None = None) -> torch.Tensor:
    """``source``, copied if writing into ``written`` would change it while it is still being read.

    Args:
        source, written: one-dimensional and contiguous.
        own_slot: element of ``written`` at which ``source`` may lie, because what arrives there is ``source`` itself.
    """
    if source.device != written.device or are_disjoint(source, written):
        return source
    if own_slot is not None and source.data_ptr() == written.data_ptr() + own_slot * written.element_size():
        return source
    return source.clone()


def overlapping(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether any two dense tensors share memory."""
    spans = sorted((start := t.data_ptr(), start + t.nbytes) for t in tensors if t.numel())
    return any(end > start for (_, end), (start, _) in pairwise(spans))
