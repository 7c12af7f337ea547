"""The native module, and what it does without a group: kernels, and questions about tensors.

Besides this one, only ``shared_memory`` calls into it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from comm_backend_ccl.tables import OPS
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support import factories
from comm_utils.torch_support.plain_tensors import TRANSFORMS, is_intercepted

__all__ = [
    "LOAD_ERROR",
    "NATIVE",
    "collecting_path",
    "collecting_paths",
    "decode",
    "decode_reduce_encode",
    "encode",
    "has_kernels",
    "plain_batch",
    "plain_tensor",
    "plain_tensors",
    "reads_storage_natively",
    "recording_functions",
    "reduce",
]

#: The module; None where there is none.
NATIVE: Any = None
#: Why there is none.
LOAD_ERROR = ""
try:
    NATIVE = importlib.import_module("comm_backend_ccl._shared_memory")
except ImportError as error:
    LOAD_ERROR = str(error)


def _bind_torch() -> bool:
    """Show native code a few tensors, by which it verifies that it reads their memory as Python does."""
    float32 = partial(factories.empty, dtype=torch.float32, device="cpu")  # whatever the defaults are
    resized = float32(8)
    resized.untyped_storage().resize_(4)
    with torch.inference_mode():
        made_there = float32(2)
    with torch.inference_mode(False):
        leaf = float32(3, requires_grad=True)
    tensors = [leaf, factories.empty(40, dtype=torch.uint8, device="cpu")[8:], resized, made_there]
    codes = {torch.float32: 6, torch.uint8: 0}  # of c10::ScalarType
    probes = [
        (
            *(one, one._cdata, one.untyped_storage().nbytes(), one.storage_offset()),
            *(codes[one.dtype], one.requires_grad, one.is_inference()),
        )
        for one in tensors
    ]
    key: int = TRANSFORMS.value
    return bool(NATIVE.bind_torch(torch.Tensor, torch.uint8, torch.int8, probes, is_intercepted, key))


#: Whether native code asks tensors through libtorch's C shim; it asks through Python otherwise.
reads_storage_natively = NATIVE is not None and _bind_torch()


def has_kernels() -> bool:
    """Return whether the functions that only compute can be called."""
    return NATIVE is not None


def reduce(dtype: int, op: ReduceOp, output: int, inputs: Sequence[int], count: int) -> None:
    """Overwrite the ``count`` elements at ``output`` with the reduction of those at ``inputs``."""
    NATIVE.reduce(dtype, OPS[op], output, inputs, count)


def encode(codec: int, source: int, error: int, count: int, block: int, wire: int, size_bytes: int) -> None:
    """Encode ``count`` float32 at ``source`` into the ``size_bytes`` at ``wire``.

    See ``native/shared_memory/kernels/codecs.hpp``. A ``wire`` of another size than the format needs is refused.
    """
    NATIVE.encode(codec, source, error, count, block, wire, size_bytes)


def decode(codec: int, wire: int, size_bytes: int, target: int, count: int, block: int, adds: bool) -> None:
    """Decode the ``size_bytes`` at ``wire`` into ``count`` float32 at ``target``, or add it to them."""
    NATIVE.decode(codec, wire, size_bytes, target, count, block, adds)


def decode_reduce_encode(
    codec: int,
    wires: Sequence[int],
    total: int,
    divisor: float,
    error: int,
    count: int,
    block: int,
    wire: int,
    size_bytes: int,
) -> None:
    """Add what the ``size_bytes`` at each of ``wires`` hold to ``count`` float32 at ``total``, and encode the sum.

    See ``native/shared_memory/kernels/codecs.hpp``.
    """
    NATIVE.decode_reduce_encode(codec, wires, total, divisor, error, count, block, wire, size_bytes)


def plain_tensor(tensor: object) -> int | None:
    """Return the code of a tensor's dtype where native code may take it as it is; None of everything else.

    Plain is a ``torch.Tensor`` and no subclass, contiguous and on the CPU, of at least one element and of a dtype of
    :data:`comm_backend_ccl.tables.DTYPES`, whose storage holds all elements and whose values no flag changes.
    """
    return None if NATIVE is None else NATIVE.plain_tensor(tensor)


def plain_tensors(
    device: int, codes: Iterable[int], inference: bool, grad: bool, otherwise: Callable[[Sequence[object]], bool]
) -> Callable[[Sequence[object]], bool] | None:
    """Return a predicate of lists and tuples that says what ``otherwise`` does, sooner for plain tensors.

    Args:
        device: DLPack's type of the devices on which it accepts them.
        codes: of the dtypes that it accepts.

    Returns:
        None where there is no native code, or torch does not offer what it asks.
    """
    if NATIVE is None:
        return None
    found: Callable[[Sequence[object]], bool] | None = NATIVE.plain_tensors(
        device, sum(1 << code for code in set(codes)), inference, grad, otherwise
    )
    return found


def plain_batch(tensors: list[torch.Tensor]) -> Any:
    """Return the native object for all of ``tensors``, see ``native/shared_memory/python/plain_batch.hpp``.

    Returns:
        None where one of them is not plain (see :func:`plain_tensor`), or two share memory.
    """
    return None if NATIVE is None else NATIVE.plain_batch(tensors)


def collecting_paths(fallback: Any, threads: dict[int, dict[Any, Any]], make: Callable[[Any], Any]) -> Any:
    """Return a cache of fast paths that collect, see ``collecting_paths.hpp``; None without native code."""
    return None if NATIVE is None else NATIVE.collecting_paths(fallback, threads, make)


def collecting_path(key: object, runs: list[Any], return_value: object) -> Any:
    """Return a fast path that collects, see ``collecting_paths.hpp``; None without native code."""
    return None if NATIVE is None else NATIVE.collecting_path(key, runs, return_value)


def recording_functions(
    memory: tuple[int, int, object], recorder: tuple[Any, ...], kind: tuple[Any, ...]
) -> tuple[Callable[..., Any], ...]:
    """Return the functions that record calls of Python, see ``recording_functions.hpp``.

    Args:
        memory: address, bytes, and what keeps it.
        recorder: the arguments that follow, of the recorder.
        kind: the arguments that follow, of the kind.
    """
    found: tuple[Callable[..., Any], ...] = NATIVE.recording_functions(*memory, *recorder, *kind)
    return found
