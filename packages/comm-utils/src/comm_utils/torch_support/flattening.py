"""Tensors of a list as one stretch of memory, for libraries that know no lists.

The tensors are dense, of one dtype and on one device; those that are written do not require gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["flat", "joined", "landing", "spread", "together"]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of its memory, (n,), without a copy."""
    if tensor.is_contiguous():
        return tensor if tensor.dim() == 1 else tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a copy of their elements, one after the other: (n,)."""
    sizes = [tensor.numel() for tensor in tensors]
    memory = tensors[0].new_empty(sum(sizes))
    for part, tensor in zip(memory.split_with_sizes(sizes), tensors, strict=True):
        part.copy_(flat(tensor).detach())
    return memory


def spread(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Overwrite ``targets`` with consecutive parts of ``source``, (n,)."""
    sizes = [target.numel() for target in targets]
    for target, part in zip(targets, source.split_with_sizes(sizes), strict=True):
        flat(target).copy_(part)


def together(sources: Sequence[torch.Tensor], target: torch.Tensor | None = None) -> torch.Tensor:
    """Their elements, one after the other, (n,), to be read while ``target`` is written: copied only if need be."""
    found = _lying_together(sources, target)
    return joined(sources) if found is None else found


def landing(targets: Sequence[torch.Tensor], source: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """Memory for all of them, one after the other, (n,), to be written while ``source`` is read.

    Returns:
        the memory, which may be theirs, and what to do when it was written.
    """
    found = _lying_together(targets, source)
    if found is not None:
        return found, lambda: _tell_autograd(targets)
    memory = source.new_empty(sum([target.numel() for target in targets]))
    return memory, lambda: spread(memory, targets)


def _tell_autograd(written: Sequence[torch.Tensor]) -> None:
    """Have it refuse a backward pass that would need what they held before, as after any operation in place."""
    for tensor in written:
        tensor.copy_(tensor)  # which copies nothing


def _lying_together(tensors: Sequence[torch.Tensor], apart_from: torch.Tensor | None) -> torch.Tensor | None:
    """Their memory, if they lie one after the other, as the chunks of one tensor do."""
    begin = end = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end:
            return None
        end += tensor.nbytes
    if apart_from is not None:
        other = apart_from.data_ptr()
        if other < end and begin < other + apart_from.nbytes:
            return None
    try:
        return tensors[0].as_strided(((end - begin) // tensors[0].element_size(),), (1,))
    except RuntimeError:  # the memory of different tensors, which happens to touch
        return None
