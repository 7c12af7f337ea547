"""Flatten lists of tensors into one, and back, for libraries that take one tensor.

The tensors are dense, of one dtype and on one device; those that are written do not require gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from comm_utils.torch_support.plain_tensors import is_intercepted

__all__ = ["count_versions", "flat_view", "flatten", "flattened", "staging_memory", "unflatten"]


# Of which torch copies whole lists at once: on a device, one kernel does what is one each otherwise.
_COPIED_AS_LIST = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of its memory, (n,), without a copy."""
    if tensor.is_contiguous():
        return tensor if tensor.dim() == 1 else tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy the elements of all ``tensors`` into one, (n,)."""
    sizes = [tensor.numel() for tensor in tensors]
    memory = tensors[0].new_empty(sum(sizes))
    _copy(memory.split_with_sizes(sizes), [flat_view(tensor).detach() for tensor in tensors])
    return memory


def unflatten(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Overwrite ``targets`` with consecutive parts of ``source``, (n,)."""
    sizes = [target.numel() for target in targets]
    _copy([flat_view(target) for target in targets], source.split_with_sizes(sizes))


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Overwrite each of ``targets`` with that of ``sources``, (n,)."""
    # Modes and transforms know of single copies.
    if targets and {targets[0].dtype, sources[0].dtype} <= _COPIED_AS_LIST and not is_intercepted():
        try:
            torch._foreach_copy_(list(targets), list(sources))
            return
        except NotImplementedError:  # with tangents of forward-mode differentiation
            pass
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def flattened(sources: Sequence[torch.Tensor], target: torch.Tensor | None = None) -> torch.Tensor:
    """Return the elements of all ``sources``, (n,), to be read while ``target`` is written.

    That is a view where they lie one after the other in memory, apart from ``target``, else a copy.
    """
    found = _consecutive_view(sources, target)
    return flatten(sources) if found is None else found


def staging_memory(targets: Sequence[torch.Tensor], source: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """Return memory for the elements of all ``targets``, (n,), to be written while ``source`` is read.

    Returns:
        the memory, which is theirs where they lie one after the other, and the function to call when it was written.
    """
    found = _consecutive_view(targets, source)
    if found is not None:
        return found, lambda: count_versions(targets)
    memory = source.new_empty(sum([target.numel() for target in targets]))
    return memory, lambda: unflatten(memory, targets)


def count_versions(written: Sequence[torch.Tensor]) -> None:
    """Count a new version of each, so that autograd refuses a backward pass that needs the values before."""
    torch.autograd.graph.increment_version(written)


def _consecutive_view(tensors: Sequence[torch.Tensor], apart_from: torch.Tensor | None) -> torch.Tensor | None:
    """Return a view of all of them, (n,), if they lie one after the other, as the chunks of one tensor do."""
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
