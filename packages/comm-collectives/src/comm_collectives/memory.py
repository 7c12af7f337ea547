"""One-dimensional views of a tensor's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from comm_utils.torch_support import factories
from comm_utils.torch_support.fast_arguments import are_disjoint

__all__ = [
    "StagingBuffer",
    "as_bytes",
    "concatenate",
    "contiguous",
    "contiguous_elements",
    "copy_back",
    "copy_if_overlapping",
    "copy_if_overlapping_any",
    "copyable",
    "current_stream",
    "is_dense",
    "memory_view",
    "overlapping",
    "used_here",
]

# Elements of less than a byte, each of which torch keeps in a byte of its own.
_NOT_COPIED = frozenset(
    getattr(torch, name) for bits in range(1, 8) for name in (f"uint{bits}", f"int{bits}") if hasattr(torch, name)
)


def current_stream(device: torch.device) -> Any:
    """Return the stream of an accelerator in which work is queued now."""
    return torch.get_device_module(device).current_stream(device)


def used_here(tensor: torch.Tensor) -> None:
    """Have the memory of a tensor, once it is freed, wait for what the current stream does with it so far.

    The allocator of a device knows the stream in which memory was made, which another stream does not wait for.
    """
    if tensor.device.type != "cpu":
        tensor.record_stream(current_stream(tensor.device))


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


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a view of it as bytes where torch cannot copy its dtype."""
    return tensor.view(torch.uint8) if tensor.dtype in _NOT_COPIED else tensor


def concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of one-dimensional tensors of one dtype and device in a new tensor."""
    device = parts[0].device.type
    if not torch.is_autocast_enabled(device):
        return torch.cat(list(parts))
    with torch.autocast(device, enabled=False):  # which would choose the dtype, and refuses float16 on the CPU
        return torch.cat(list(parts))


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its elements in memory in their logical order; copied only where they are not."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        dtype, tensor = tensor.dtype, tensor.detach().resolve_conj().resolve_neg()
        return copyable(tensor).contiguous().view(dtype)
    return tensor.detach() if tensor.requires_grad else tensor


def contiguous_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in their logical order as one dimension.

    Copied only where they do not lie in memory like that.
    """
    return memory_view(contiguous(tensor))


def as_bytes(tensor: torch.Tensor, native: frozenset[torch.dtype]) -> torch.Tensor:
    """Return a contiguous tensor, as it is if its dtype is one of ``native``, else its memory as uint8, (n,)."""
    return tensor if tensor.dtype in native else memory_view(tensor).view(torch.uint8)


class StagingBuffer:
    """A staging buffer into which a backend writes the elements of ``tensor`` in logical order.

    Args:
        shaped: give ``memory`` the shape of ``tensor``, which profilers show, instead of (n,).
        on_host: the backend needs memory of the host, whatever device the tensor is on.

    Attributes:
        memory: to be given to the backend; the tensor's own memory where that can be, else private memory.
    """

    def __init__(self, tensor: torch.Tensor, shaped: bool = False, on_host: bool = False) -> None:
        self._tensor = tensor
        device = torch.device("cpu") if on_host else tensor.device
        # c10d, which copies for some calls, cannot write tensors of the inference mode outside of it; copy_back() can.
        writable = not tensor.is_inference() or torch.is_inference_mode_enabled()
        self._direct = tensor.is_contiguous() and writable and tensor.device == device
        if not self._direct:
            shape = tensor.shape if shaped else (tensor.numel(),)
            self.memory = factories.empty(shape, dtype=tensor.dtype, device=device)
        elif shaped:
            self.memory = tensor.detach() if tensor.requires_grad else tensor
        else:
            self.memory = memory_view(tensor)

    def copy_back(self) -> None:
        """Copy from private memory into the tensor, if it was needed."""
        if not self._direct:
            copyable(self._tensor.detach()).copy_(copyable(self.memory.view(self._tensor.shape)))


def copy_back(buffers: list[StagingBuffer]) -> Callable[[], None] | None:
    """Return the function that copies back; None where the backend wrote in place everywhere."""
    indirect = [buffer for buffer in buffers if not buffer._direct]
    if not indirect:
        return None

    def finish() -> None:
        for buffer in indirect:
            buffer.copy_back()

    return finish


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
    return copyable(source).clone().view(source.dtype)


def copy_if_overlapping_any(source: torch.Tensor, buffers: list[StagingBuffer], own: int) -> torch.Tensor:
    """Return ``source``, copied if it lies where another rank's elements arrive; ``own`` is this rank."""
    for rank, buffer in enumerate(buffers):
        source = copy_if_overlapping(source, buffer.memory, own_slot=0 if rank == own else None)
    return source


def overlapping(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether any two dense tensors share memory."""
    spans = sorted((start := t.data_ptr(), start + t.nbytes) for t in tensors if t.numel())
    return any(end > start for (_, end), (start, _) in pairwise(spans))
