"""Native kernels for every layer; named by the entry points ``comm_utils.kernels``.

Looking them up imports this package, which makes ``"ccl"`` known to ``torch.distributed`` and does nothing else.
The headers in ``native/shared_memory/kernels`` and ``python`` say what native code takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch

from comm_backend_ccl.native_module import NATIVE, has_kernels, plain_tensor
from comm_backend_ccl.shared_memory import MOST_RANKS
from comm_backend_ccl.tables import CODECS, DTYPES, IN_SHARED_MEMORY, OPS
from comm_utils.kernels import CollectingPaths, PathsByKey, PlainBatch, SizesOfDtype
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support import plain_tensors as plain_predicates
from comm_utils.torch_support.flattening import count_versions
from comm_utils.torch_support.plain_tensors import PlainTensors

__all__ = [
    "NativeBatch",
    "collecting_path",
    "collecting_paths",
    "decode",
    "decode_reduce_encode",
    "encode",
    "plain_batch",
    "plain_tensors",
    "recording_functions",
    "reduce",
]

# DLPack's types of the devices on which native code takes tensors; HIP's devices have another one than CUDA's.
_DEVICES = {"cpu": 1, **({} if torch.version.hip else {"cuda": 2})}
_DTYPES = {code: dtype for dtype, code in DTYPES.items()}


def plain_tensors(
    device_type: str,
    dtypes: Iterable[torch.dtype],
    inference: bool,
    grad: bool,
    otherwise: Callable[[Sequence[object]], bool],
) -> Callable[[Sequence[object]], bool] | None:
    """See ``comm_utils.kernels.plain_tensors``."""
    device = _DEVICES.get(device_type)
    if device is None or NATIVE is None:
        return None
    codes = {DTYPES[dtype] for dtype in dtypes if dtype in DTYPES}
    found: Callable[[Sequence[object]], bool] | None = NATIVE.plain_tensors(
        device, sum(1 << code for code in codes), inference, grad, otherwise
    )
    return found


def encode(codec: str, source: torch.Tensor, wire: torch.Tensor, block: int, error: torch.Tensor | None) -> bool:
    """See ``comm_utils.kernels.encode``."""
    code = _code(codec, source, wire)
    if code is None or not _is_error_of(source, error):
        return False
    lost = 0 if error is None else error.data_ptr()
    NATIVE.encode(code, source.data_ptr(), lost, source.numel(), block, wire.data_ptr(), wire.numel())
    return True


def decode(codec: str, wire: torch.Tensor, target: torch.Tensor, block: int, adds: bool) -> bool:
    """See ``comm_utils.kernels.decode``."""
    code = _code(codec, target, wire)
    if code is None:
        return False
    NATIVE.decode(code, wire.data_ptr(), wire.numel(), target.data_ptr(), target.numel(), block, adds)
    return True


def decode_reduce_encode(
    codec: str,
    wires: Sequence[torch.Tensor],
    total: torch.Tensor,
    divisor: int,
    wire: torch.Tensor,
    block: int,
    error: torch.Tensor | None,
) -> bool:
    """See ``comm_utils.kernels.decode_reduce_encode``."""
    code = _code(codec, total, wire, *wires)
    if code is None or len(wires) > MOST_RANKS or not _is_error_of(total, error):
        return False
    if any(one.numel() != wire.numel() for one in wires):
        return False
    NATIVE.decode_reduce_encode(
        code,
        [one.data_ptr() for one in wires],
        total.data_ptr(),
        divisor,
        0 if error is None else error.data_ptr(),
        total.numel(),
        block,
        wire.data_ptr(),
        wire.numel(),
    )
    return True


def _code(codec: str, elements: torch.Tensor, *wires: torch.Tensor) -> int | None:
    """Return the code of a format; None where native code does not have it, or cannot take the tensors."""
    code = CODECS.get(codec)
    if code is None or not has_kernels() or not _is_plain(elements, torch.float32):
        return None
    return code if all(_is_plain(wire, torch.uint8) for wire in wires) else None


def _is_error_of(elements: torch.Tensor, error: torch.Tensor | None) -> bool:
    return error is None or (_is_plain(error, torch.float32) and error.numel() == elements.numel())


class NativeBatch(PlainBatch):
    """See ``comm_utils.kernels.PlainBatch``."""

    __slots__ = ("_sizes", "native")

    def __init__(self, native: Any) -> None:
        self.native = native
        self.is_usual = native.is_usual()
        self._sizes: dict[torch.dtype, SizesOfDtype] | None = None

    @property
    def sizes(self) -> dict[torch.dtype, SizesOfDtype]:
        if self._sizes is None:
            self._sizes = {_DTYPES[code]: SizesOfDtype(*found) for code, found in self.native.sizes().items()}
        return self._sizes

    def tensors(self, dtype: torch.dtype) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self.native.tensors(DTYPES[dtype])
        return found

    def pack(self, buckets: Sequence[torch.Tensor]) -> bool:
        places = _places(buckets)
        return places is not None and bool(self.native.pack(places))

    def unpack(self, buckets: Sequence[torch.Tensor]) -> bool:
        places = _places(buckets)
        counted = None if places is None else self.native.unpack(places)
        if counted is None:
            return False
        if not counted:
            for bucket in buckets:
                count_versions(self.tensors(bucket.dtype))
        return True


def _places(buckets: Sequence[torch.Tensor]) -> list[tuple[int, int, int]] | None:
    """Return dtype, address and bytes of each; None where one is not plain."""
    places = []
    for one in buckets:
        code = plain_tensor(one)
        if code is None:
            return None
        places.append((code, one.data_ptr(), one.nbytes))
    return places


def plain_batch(tensors: list[torch.Tensor]) -> NativeBatch | None:
    """See ``comm_utils.kernels.plain_batch``."""
    native = None if NATIVE is None else NATIVE.plain_batch(tensors)
    return None if native is None else NativeBatch(native)


def collecting_paths(
    fallback: PathsByKey, threads: dict[int, dict[Any, Any]], make: Callable[[Any], Any]
) -> CollectingPaths | None:
    """See ``comm_utils.kernels.collecting_paths``."""
    return None if NATIVE is None else NATIVE.collecting_paths(fallback, threads, make)


def collecting_path(key: object, runs: list[Any], return_value: object) -> Callable[..., Any] | None:
    """See ``comm_utils.kernels.collecting_path``."""
    return None if NATIVE is None else NATIVE.collecting_path(key, runs, return_value)


def recording_functions(
    recorder: Any, series: object, kind: int, signature: int, counts: bool, tag_word: int
) -> tuple[Callable[..., Any], ...] | None:
    """See ``comm_utils.kernels.recording_functions``."""
    if NATIVE is None:
        return None
    memory = recorder.memory
    kept = ctypes.c_char.from_buffer(memory.memory)
    found: tuple[Callable[..., Any], ...] = NATIVE.recording_functions(
        *(ctypes.addressof(kept), len(memory.memory), kept),
        *(recorder.numbers, recorder.caller, recorder.note_thread, recorder.sites, memory.add_splits),
        *(series, kind, signature, counts, tag_word),
    )
    return found


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether native code may take the address of ``tensor`` for that of so many elements."""
    if tensor.numel() == 0:  # whose address nothing reads
        return type(tensor) is torch.Tensor and tensor.dtype is dtype and tensor.device.type == "cpu"
    return _are_plain(dtype)([tensor])


@cache
def _are_plain(dtype: torch.dtype) -> PlainTensors:
    # In Python with a torch whose tensors native code cannot read, before 2.10.
    return plain_predicates.plain_tensors("cpu", (dtype,), inference=True)


def reduce(output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp) -> bool:
    """See ``comm_utils.kernels.reduce``; of plain, contiguous tensors on the CPU."""
    dtype, shape = output.dtype, output.shape
    possible = has_kernels() and (op, dtype) in IN_SHARED_MEMORY.reductions
    if not possible or not 0 < len(inputs) <= MOST_RANKS:
        return False
    if not all(one.shape == shape and _is_plain(one, dtype) for one in (output, *inputs)):
        return False
    begin, size = output.data_ptr(), output.nbytes
    if any(0 < abs(one.data_ptr() - begin) < size for one in inputs):
        return False  # overwritten before it is read
    NATIVE.reduce(DTYPES[dtype], OPS[op], begin, [tensor.data_ptr() for tensor in inputs], output.numel())
    return True
