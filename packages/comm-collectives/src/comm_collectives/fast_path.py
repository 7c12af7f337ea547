"""The fast path: after one validated call, similar calls use what the backend prepared for them.

What can be wrong with a call depends on the operation, its dtype, device, group and root, which repeat, and on the
tensors themselves. The first are looked up; what is left to check is here. ``all_reduce`` has its own lines.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_collectives.memory import disjoint, overlapping
from comm_utils.active import slot
from comm_utils.backend import Backend

__all__ = [
    "barrier",
    "between",
    "exchange",
    "exchange_of_lists",
    "from_list",
    "into_list",
    "on",
    "remember",
    "remember_moving",
    "remember_shortest",
    "with_root",
]

_Tensor = torch.Tensor


def remember(backend: Backend, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return the fast path for calls like this one, and keep it for the next.

    Args:
        key: (operation, op or root or both, dtype, device, group).
        make: makes what :func:`on` or :func:`between` returns for them.
    """
    try:
        return backend.prepared[key]
    except KeyError:
        made = backend.prepared[key] = make()
        return made


def remember_shortest(backend: Backend, name: str, op: object, group: ProcessGroup | None) -> None:
    """Let the facade's ``name`` with ``op`` take the backend's fast path, if it has one.

    It looks for ``(name, group, op)`` before anything else, so ``op`` is a string: equal to no other kind of object. A
    sum over all ranks is under ``name`` alone, as a tuple takes as long to look up as a tenth of the call.
    """
    key = (name, group, op)
    if type(op) is str and key not in backend.prepared:
        shortest = backend.shortest_all_reduce(group, op)
        if shortest is not None:
            backend.prepared[key] = shortest
            if group is None and op == "sum":
                backend.prepared[name] = shortest


def remember_moving(
    backend: Backend,
    operation: str,
    root: object,
    tensor: torch.Tensor,
    group: ProcessGroup | None,
    make: Callable[[], Any],
) -> None:
    """:func:`remember` for an operation that only moves ``tensor``, where the library moves its dtype as it is."""
    if tensor.dtype in backend.capabilities(group, tensor.device.type).dtypes and not tensor.is_complex():
        remember(backend, (operation, root, tensor.dtype, tensor.device, group), make)


def on(operation: str, detail: object, tensor: Any, group: ProcessGroup | None) -> Any:
    """Return what was remembered for a call on one tensor; None where it has to be checked in full.

    Args:
        detail: the root or the peer, with the op where there is one.
    """
    try:
        call = slot.backend.prepared.get((operation, detail, tensor.dtype, tensor.device, group))
        if (
            call is None
            or type(tensor) is not _Tensor
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or tensor.is_nested
            or tensor.is_inference()
        ):
            return None
    except (AttributeError, RuntimeError, TypeError):
        return None  # not a strided tensor, not initialised: the full check says so
    return call


def between(operation: str, op: object, output: Any, input: Any, group: ProcessGroup | None) -> Any:
    """Return what was remembered for a call from one tensor to another; None where it has to be checked in full."""
    try:
        dtype, device = input.dtype, input.device
        found = slot.backend.prepared.get((operation, op, dtype, device, group))
        if (
            found is None
            or type(input) is not _Tensor
            or type(output) is not _Tensor
            or output.dtype is not dtype
            or output.device != device
            or not (input.is_contiguous() and output.is_contiguous())
            or input.is_neg()
            or output.is_neg()
            or input.is_nested
            or output.is_nested
            or output.is_inference()
            or output.requires_grad
            or input.requires_grad
        ):
            return None
    except (AttributeError, RuntimeError, TypeError):
        return None
    return found


def into_list(parts: Any, tensor: Any, group: ProcessGroup | None) -> Any:
    """Return what was remembered for an ``all_gather`` into a list; None where it has to be checked in full."""
    found = on("all_gather", None, tensor, group)
    if found is None:
        return None
    call, W, rank = found
    return call if _fit(parts, tensor, W, rank) else None


def with_root(operation: str, root: object, tensor: Any, parts: Any, group: ProcessGroup | None) -> Any:
    """Return what was remembered for a ``gather`` or ``scatter``; None where it has to be checked in full.

    Args:
        parts: every rank's part, on the root.
    """
    found = on(operation, root, tensor, group)
    if found is None or tensor.requires_grad:
        return None
    call, W, position, rank = found
    if rank != position:
        return call if parts is None else None
    return call if _fit(parts, tensor, W, rank) else None


def from_list(operation: str, op: object, parts: Any, output: Any, group: ProcessGroup | None) -> Any:
    """Return what was remembered for a ``reduce_scatter`` of a list; None where it has to be checked in full."""
    found = on(operation, op, output, group)
    if found is None or output.requires_grad:
        return None
    call, W = found
    return call if _are_alike(parts, output, W, output.shape) else None


def exchange(output: Any, input: Any, rows_out: Any, rows_in: Any, group: ProcessGroup | None) -> Any:
    """Return what was remembered for an ``all_to_all_single`` with sizes; None where it has to be checked in full."""
    found = between("all_to_all_v", None, output, input, group)
    if found is None or not (input.dim() and output.dim()) or output.shape[1:] != input.shape[1:]:
        return None
    call, W, rank = found
    for rows, tensor in ((rows_out, output), (rows_in, input)):
        if type(rows) is not list or len(rows) != W:
            return None
        for count in rows:
            if type(count) is not int or count < 0:
                return None
        if sum(rows) != tensor.shape[0]:
            return None
    return call if rows_out[rank] == rows_in[rank] and disjoint(output, input) else None


def exchange_of_lists(outputs: Any, inputs: Any, group: ProcessGroup | None) -> Any:
    """Return what was remembered for an ``all_to_all``; None where it has to be checked in full."""
    if type(inputs) is not list or not inputs:
        return None
    first = inputs[0]
    found = on("all_to_all", None, first, group)
    if found is None:
        return None
    call, W, rank = found
    if not (_are_alike(inputs, first, W) and _are_alike(outputs, first, W)):
        return None
    return call if outputs[rank].numel() == inputs[rank].numel() and not overlapping(outputs) else None


def _are_alike(parts: Any, like: torch.Tensor, W: int, shape: torch.Size | None = None) -> bool:
    """Return whether ``parts`` are W tensors like another one, of ``shape`` or of any."""
    if type(parts) is not list or len(parts) != W:
        return False
    try:
        dtype, device = like.dtype, like.device
        for part in parts:
            if (
                type(part) is not _Tensor
                or part.dtype is not dtype
                or part.device != device
                or (shape is not None and part.shape != shape)
                or not part.is_contiguous()
                or part.is_neg()
                or part.is_nested
                or part.is_inference()
                or part.requires_grad
            ):
                return False
    except (AttributeError, RuntimeError, TypeError):
        return False
    return True


def _fit(parts: Any, tensor: torch.Tensor, W: int, rank: int) -> bool:
    """Return whether ``parts`` are W tensors like ``tensor``, which is one itself or apart from them."""
    if not _are_alike(parts, tensor, W, tensor.shape):
        return False
    size, own = tensor.nbytes, tensor.data_ptr()
    starts = [part.data_ptr() for part in parts]
    if own != starts[rank] and any(start < own + size and own < start + size for start in starts):
        return False  # read while others' elements arrive there
    starts.sort()
    return all(after - start >= size for start, after in pairwise(starts))


def barrier(group: ProcessGroup | None) -> Any:
    """Return what was remembered for a barrier of ``group``; None where it has to be checked in full."""
    try:
        return slot.backend.prepared.get(("barrier", group))
    except (RuntimeError, TypeError):
        return None
