"""The one predicate for plain tensors, which fast paths take as they are, and the storage that a tensor needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from comm_utils import kernels
from comm_utils.fast_path import FastPath

__all__ = [
    "TRANSFORMS",
    "PlainTensors",
    "by_device",
    "is_intercepted",
    "missing_storage",
    "plain_tensors",
    "present",
]

#: Return whether all of some objects are plain tensors of one dtype on one device.
PlainTensors: TypeAlias = Callable[[Sequence[object]], bool]

_count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_is_traced: Callable[[], bool] = torch._C._is_tracing
_includes: Callable[[torch._C.DispatchKey], bool] = torch._C._dispatch_tls_is_dispatch_key_included
#: The dispatch key that is included on a thread within a transform of ``torch.func``.
TRANSFORMS = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
# What the accessors of tensors without memory of their own raise, under vmap and for mkldnn among others.
_NO_ACCESS = (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError)


def is_intercepted() -> bool:
    """Return whether something takes over what torch does on this thread.

    That is a dispatch mode such as FakeTensorMode, a transform of ``torch.func`` such as vmap, or ``torch.jit.trace``.
    """
    return bool(_count_modes() or _includes(TRANSFORMS) or _is_traced())


def present(device_types: Iterable[str]) -> list[str]:
    """Return those kinds of device that this machine has, and of which there can be tensors."""
    return [one for one in device_types if one == "cpu" or _is_available(one)]


def _is_available(device_type: str) -> bool:
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except RuntimeError:  # torch knows the name, and nothing registered a module for it
        return False


def plain_tensors(
    device_type: str, dtypes: Iterable[torch.dtype], *, inference: bool = False, grad: bool = True
) -> PlainTensors:
    """Make the predicate for one kind of device and some dtypes.

    A plain tensor is exactly a ``torch.Tensor``, has elements, is contiguous, and its memory holds what the tensor
    means: it is not negated or conjugated lazily, nested, sparse, quantized, fake, wrapped by functorch or without
    memory, and its storage has room for all of its elements. None is plain while something takes over what
    torch does (:func:`is_intercepted`).

    Args:
        dtypes: those that are accepted; neither complex nor quantized ones.
        inference: accept tensors that were made in inference mode.
        grad: accept tensors that require gradients.

    Returns:
        the predicate; the native one, which answers the same sooner, where an installed package has one.
    """
    accepted, kind = frozenset(dtypes), torch.Tensor
    on_cpu = device_type == "cpu"

    def are_plain(tensors: Sequence[object]) -> bool:
        if not on_cpu and _count_function_modes():
            # Such as that of torch.set_default_device, through which each of the questions below would go.
            with torch._C.DisableTorchFunction():
                return found_plain(tensors)
        return found_plain(tensors)

    def found_plain(tensors: Sequence[object]) -> bool:
        dtype = device = None
        if is_intercepted():
            return False
        try:
            for tensor in tensors:
                if type(tensor) is not kind:
                    return False
                own = tensor.dtype
                if own is not dtype:
                    if dtype is not None or own not in accepted:
                        return False
                    dtype = own
                if on_cpu:
                    if not tensor.is_cpu:
                        return False
                elif device is None:
                    device = tensor.device
                    if device.type != device_type:
                        return False
                elif tensor.device != device:
                    return False
                if (
                    not tensor.is_contiguous()
                    or tensor.is_neg()
                    or tensor.is_nested
                    or not tensor.data_ptr()  # no elements, or elements that are nowhere: torch._efficientzerotensor
                    or not (inference or not tensor.is_inference())
                    or not (grad or not tensor.requires_grad)
                ):
                    return False
                needed: Any = tensor.nbytes
                offset = tensor.storage_offset()
                if offset:
                    needed += offset * tensor.element_size()
                if len(tensor.untyped_storage()) < needed:
                    return False
        except _NO_ACCESS:
            return False
        return True

    return kernels.plain_tensors(device_type, accepted, inference, grad, are_plain) or are_plain


def by_device(fast_paths: Mapping[str, FastPath], refused: bool | None = False) -> FastPath | None:
    """Return a fast path that hands a call to that of its first tensor's type of device; None if there are none.

    Args:
        fast_paths: by type of device; their first argument is a tensor, a list or tuple of tensors, or a
            :class:`comm_utils.kernels.PlainBatch`, which is of the CPU.
        refused: what it returns where it does not take the call; None of asynchronous ones.
    """
    if len(fast_paths) < 2:
        return next(iter(fast_paths.values()), None)
    kind, paths = torch.Tensor, dict(fast_paths)

    def path_of_device(*tensors: Any) -> Any:
        first = tensors[0]
        if isinstance(first, (list, tuple)) and first:
            first = first[0]
        if type(first) is kind:
            path = paths.get("cpu" if first.is_cpu else first.device.type)
        else:
            path = paths.get("cpu") if isinstance(first, kernels.PlainBatch) else None
        return refused if path is None else path(*tensors)

    return path_of_device


def missing_storage(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the bytes that the storage of a strided ``tensor`` has and needs; None where it has enough."""
    if not tensor.numel():
        return None
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    needed: Any = (tensor.storage_offset() + last + 1) * tensor.element_size()
    found: Any = tensor.untyped_storage().nbytes()
    return None if found >= needed else (found, needed)
