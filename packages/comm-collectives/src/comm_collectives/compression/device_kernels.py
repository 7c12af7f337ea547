"""The formats of the codecs on NVIDIA GPUs, in one kernel each, where triton is installed.

They give the bits of what the codecs compute by torch, and of ``comm_backend_ccl`` on the CPU: divisions are rounded to
nearest, and no product and sum are fused. torch needs ten kernels and more for a block format, each of which reads or
writes all elements.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch

from comm_utils.log import logger

__all__ = ["decode", "encode"]

# Elements of a program.
_TILE = 4096
# Of the integer formats, the largest level; 8-bit floats by their largest finite value.
_LEVELS = {"int8": 127.0, "int4": 7.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
_KINDS = {"int8": 0, "int4": 1, "fp8_e4m3": 2, "fp8_e5m2": 2}
_CASTS = ("fp16", "bf16")
_BITS = {"fp16": 16, "bf16": 16, "fp8_e4m3": 8, "fp8_e5m2": 8, "int8": 8, "int4": 4, "onebit": 1}
# From which compute capability on triton rounds to a format once, to nearest: before, by way of float16, or not at all.
_ROUNDS_SINCE = {"bf16": (8, 0), "fp8_e4m3": (9, 0), "fp8_e5m2": (9, 0)}
# Formats of which a kernel could not be built: every further try would take as long.
_broken: set[str] = set()


def encode(codec: str, source: torch.Tensor, wire: torch.Tensor, block: int, error: torch.Tensor | None) -> bool:
    """Overwrite ``wire`` with ``source``, both on a GPU; see ``comm_utils.kernels.encode``.

    Returns:
        False, with nothing done, where there is no kernel for the format or on the device.
    """
    if not (_is_on_gpu(source) and _is_served(codec, block, source) and _fit(codec, block, source, wire, error)):
        return False
    if codec in _CASTS and error is None:  # torch's own copy is as fast
        return False
    return _run("encode", codec, source, wire, block, error is not None, source if error is None else error)


def decode(codec: str, wire: torch.Tensor, target: torch.Tensor, block: int, adds: bool) -> bool:
    """Overwrite ``target`` with what ``wire`` holds, or add it; see ``comm_utils.kernels.decode``.

    Returns:
        False, with nothing done, where there is no kernel for the format or on the device.
    """
    if not (_is_on_gpu(target) and _is_served(codec, block, target) and _fit(codec, block, target, wire)):
        return False
    if codec in _CASTS and not adds:
        return False
    return _run("decode", codec, target, wire, block, adds, target)


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _is_served(codec: str, block: int, elements: torch.Tensor) -> bool:
    """Return whether a kernel has this format on this device: triton's tiles are powers of two."""
    if codec not in _BITS or block & (block - 1) or block > _TILE:
        return False
    since = _ROUNDS_SINCE.get(codec)
    return since is None or not elements.is_cuda or _capability(elements.device) >= since


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _fit(codec: str, block: int, elements: torch.Tensor, wire: torch.Tensor, error: torch.Tensor | None = None) -> bool:
    """Return whether the kernels may go by the addresses of these tensors; what torch refuses is left to it."""
    floats, count = (elements,) if error is None else (elements, error), elements.numel()
    size = -(-count * _BITS[codec] // 8) + (0 if codec in _CASTS else 4 * -(-count // block))
    return (
        count > 0
        and all(
            one.dtype is torch.float32 and one.is_contiguous() and not one.is_neg() and one.numel() == count
            for one in floats
        )
        and wire.dtype is torch.uint8
        and wire.is_contiguous()
        and wire.numel() == size
        and wire.storage_offset() % 4 == wire.data_ptr() % 4 == 0
        and len({one.device for one in (*floats, wire)}) == 1
    )


def _run(way: str, codec: str, elements: torch.Tensor, wire: torch.Tensor, block: int, flag: bool, extra: Any) -> bool:
    kernels = None if codec in _broken else _kernels()
    if kernels is None:
        return False
    count = elements.numel()
    constants: dict[str, Any] = {}
    if codec in _CASTS:
        name, block = "cast", _TILE
        scales, values = wire, wire.view(torch.float16 if codec == "fp16" else torch.bfloat16)
    else:
        name = "signs" if codec == "onebit" else "blocks"
        split = 4 * -(-count // block)
        scales, values = wire[:split].view(torch.float32), wire[split:]
        if codec.startswith("fp8"):
            values = values.view(torch.float8_e4m3fn if codec == "fp8_e4m3" else torch.float8_e5m2)
        if name == "blocks":
            constants = {"LEVELS": _LEVELS[codec], "KIND": _KINDS[codec]}
    grid = (-(-count // _TILE),)
    try:
        with torch.cuda.device(elements.device) if elements.is_cuda else nullcontext():
            getattr(kernels, f"{way}_{name}")[grid](
                elements,
                extra,
                scales,
                values,
                count,
                FLAG=flag,
                BLOCK=block,
                ROWS=_TILE // block,
                **constants,
                enable_fp_fusion=False,
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of triton's compiler, which wants a C compiler, a folder and a device that it knows
        _broken.add(codec)
        logger.warning(
            "compression by %s goes on in torch's own kernels, which take several times as long: triton cannot build "
            "one: %s: %s",
            codec,
            type(error).__name__,
            error,
        )
        return False
    return True


@functools.cache
def _kernels() -> Any:
    """Return the module of the kernels; None where triton is not installed or not for this kind of GPU."""
    if torch.version.hip is not None:
        return None
    try:
        from comm_collectives.compression import triton_codecs
    except ImportError:
        return None
    return triton_codecs
