"""Tensors: dtype, shape and the bytes of the elements in their logical order.

A tensor arrives contiguous. It is on the CPU if it was there, else on the receiver's current device of the same kind
(not of the same index, which belongs to another rank), or on the CPU where the receiver has none. A leaf keeps
``requires_grad`` and a ``Parameter`` its type; gradients and the history of what was computed stay behind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from struct import Struct
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from comm_collectives.memory import contiguous_elements
from comm_collectives.object_codec.errors import ObjectDecodeError, Refused
from comm_collectives.object_codec.scalars import DTYPES, dtype_name, read_dtype
from comm_collectives.object_codec.wire import Read, Reader, Tag, Write, Writer
from comm_utils.torch_support import factories
from comm_utils.torch_support.plain_tensors import missing_storage

__all__ = ["READERS", "WRITERS", "refuse_subclass"]

_HEAD = Struct("=BBBB")  # flags, device, number of dimensions, length of the dtype's name
_REQUIRES_GRAD, _PARAMETER = 1, 2
_MAX_DIMENSIONS = 64
_NESTED = "got a nested tensor; send unbind() of it"
# Positions are part of the format.
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "npu", "mtia")
# Elements of less than a byte and quantized ones are not contiguous_elements without facts that are kept elsewhere.
_OPAQUE = frozenset(dtype for name, dtype in DTYPES.items() if re.fullmatch(r"q.*|u?int[1-7]", name))


def _write_tensor(writer: Writer, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise Refused(f"got an {type(tensor).__name__}, which has no shape yet")
    if tensor.is_nested:
        raise Refused(_NESTED)
    if tensor.layout is not torch.strided:
        raise Refused(f"got a sparse tensor ({tensor.layout}); send to_dense() of it")
    if tensor.dtype in _OPAQUE:
        remedy = "its int_repr(), and scales apart" if tensor.is_quantized else "view(torch.uint8) of it"
        raise Refused(f"got a tensor of {tensor.dtype}; send {remedy}")
    if tensor.device.type == "meta":
        raise Refused("got a tensor on the device 'meta', which has no elements")
    if tensor.dim() > _MAX_DIMENSIONS:
        raise Refused(f"got a tensor of {tensor.dim()} dimensions; at most {_MAX_DIMENSIONS} can be sent")
    _check_memory(tensor)
    name = dtype_name(tensor.dtype).encode()
    kind = tensor.device.type
    device = _DEVICES.index(kind) if kind in _DEVICES else 0
    flags = (_REQUIRES_GRAD if tensor.requires_grad and tensor.is_leaf else 0) | (
        _PARAMETER if isinstance(tensor, torch.nn.Parameter) else 0
    )
    size_bytes = tensor.numel() * tensor.element_size()
    writer.check(size_bytes)  # before a copy of elements that do not lie in order is made
    writer.begin(Tag.TENSOR)
    writer.out += _HEAD.pack(flags, device, tensor.dim(), len(name))
    writer.out += name
    for size in tensor.shape:
        writer.size(size)
    if size_bytes:
        elements = contiguous_elements(tensor).view(torch.uint8)
        # True can be any byte in memory that was written as another type; readers accept 1.
        writer.part(elements.ne(0).view(torch.uint8) if tensor.dtype == torch.bool else elements, size_bytes)


def _check_memory(tensor: torch.Tensor) -> None:
    try:
        missing = missing_storage(tensor)
    except (NotImplementedError, RuntimeError, TypeError):
        raise Refused("got a tensor without memory of its own, as under torch.vmap or torch.func.grad") from None
    if missing is not None:
        raise Refused(
            f"got a tensor whose storage has {missing[0]} bytes, but its shape {tuple(tensor.shape)} needs "
            f"{missing[1]}; resize the storage before",
            wrong_kind=False,
            damaged=True,
        )


def _read_tensor(reader: Reader) -> torch.Tensor:
    reader.skip_filler(Tag.TENSOR)
    flags, device, dimensions, name_bytes = reader.unpack(_HEAD)
    dtype = read_dtype(str(reader.take(name_bytes), "ascii"))
    if dtype in _OPAQUE or dimensions > _MAX_DIMENSIONS or device >= len(_DEVICES):
        raise ObjectDecodeError(f"a tensor of {dtype}, {dimensions} dimensions and device {device} is never sent")
    shape = [reader.size() for _ in range(dimensions)]
    if prod(shape):
        memory = reader.take(prod(shape) * dtype.itemsize)
        raw = torch.frombuffer(memory, dtype=torch.uint8).clone()
        if dtype == torch.bool and bool((raw > 1).any()):
            raise ObjectDecodeError("a bool tensor has bytes other than 0 and 1")
        tensor = raw.view(dtype).view(shape)
    else:
        tensor = factories.empty(shape, dtype=dtype, device="cpu")
    tensor = _to_device(tensor, _DEVICES[device])
    requires_grad = bool(flags & _REQUIRES_GRAD)
    if flags & _PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _to_device(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "cpu" or not _has_device(kind):
        return tensor
    return tensor.to(kind)


def _has_device(kind: str) -> bool:
    module: Any = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())


def refuse_subclass(tensor: torch.Tensor) -> Refused:
    """Return why a tensor of a subclass is not sent, and what to send."""
    with torch._C.DisableTorchFunctionSubclass():  # which may raise anything
        return _refuse_subclass(tensor)


def _refuse_subclass(tensor: torch.Tensor) -> Refused:
    kind = type(tensor).__name__
    if is_lazy(tensor):
        return Refused(f"got an {kind}, which has no shape yet")
    if tensor.is_nested:
        return Refused(_NESTED)
    if isinstance(tensor, FakeTensor):
        return Refused(f"got a {kind}, which has no elements; send a real tensor")
    if kind == "DTensor":
        instead = "full_tensor() or to_local()"
    elif kind == "AsyncCollectiveTensor":
        instead = "wait()"
    elif _is_wrapper(tensor):
        return Refused(f"got a {kind}, whose elements lie in tensors within it; send these")
    else:
        instead = "as_subclass(torch.Tensor)"
    return Refused(f"got a tensor of the subclass {kind}, whose further state cannot be sent; send {instead} of it")


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of a subclass has elements, and no memory that ``as_subclass()`` would show."""
    try:
        return tensor.device.type != "meta" and bool(tensor.numel()) and not tensor.data_ptr()
    except (NotImplementedError, RuntimeError, TypeError):
        return True


WRITERS: Mapping[type, Write] = {torch.Tensor: _write_tensor, torch.nn.Parameter: _write_tensor}
READERS: Mapping[int, Read] = {Tag.TENSOR: _read_tensor}
