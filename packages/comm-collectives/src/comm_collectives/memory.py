"""One-dimensional views of a tensor's memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["Landing", "after_landing", "as_bytes", "flat", "is_dense", "readable"]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory without gap or overlap, in whatever order (as channels_last)."""
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


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as one dimension, sharing it, in the order of the memory."""
    # Not view(-1): it keeps the stride of a dimension of one or no element, and then refuses to be viewed as bytes.
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in their logical order as one dimension; copied only where they do not lie in memory like that."""
    return flat(tensor.detach().resolve_conj().resolve_neg().contiguous())


def as_bytes(tensor: torch.Tensor, native: frozenset[torch.dtype]) -> torch.Tensor:
    """A one-dimensional tensor, as it is if its dtype is one of ``native``, else its memory as uint8."""
    return tensor if tensor.dtype in native else tensor.view(torch.uint8)


class Landing:
    """Where a backend writes the elements of ``tensor`` in logical order.

    Attributes:
        memory: (n,), to be given to the backend; the tensor's own memory where it is contiguous, else private memory.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._direct = tensor.is_contiguous()
        self.memory = (
            flat(tensor) if self._direct else torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        )

    def land(self) -> None:
        """Copy from private memory into the tensor, if it was needed."""
        if not self._direct:
            self._tensor.detach().copy_(self.memory.view(self._tensor.shape))


def after_landing(landings: list[Landing]) -> Callable[[], None] | None:
    """What remains to be done once the backend has written; None where it wrote in place everywhere."""
    indirect = [landing for landing in landings if not landing._direct]
    if not indirect:
        return None

    def finish() -> None:
        for landing in indirect:
            landing.land()

    return finish
