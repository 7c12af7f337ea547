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
# Formats of which a kernel could not be built: every further try would take as long.
_broken: set[str] = set()


def encode(codec: str, source: torch.Tensor, wire: torch.Tensor, block: int, error: torch.Tensor | None) -> bool:
    """Overwrite ``wire`` with ``source``, both on a GPU; see ``comm_utils.kernels.encode``.

    Returns:
        False, with nothing done, where there is no kernel for the format or on the device.
    """
    if not (_is_on_gpu(source) and _is_served(codec, block) and _are_plain(source, wire, error)):
        return False
    if codec in _CASTS and error is None:  # torch's own copy is as fast
        return False
    return _run("encode", codec, source, wire, block, error is not None, source if error is None else error)


def decode(codec: str, wire: torch.Tensor, target: torch.Tensor, block: int, adds: bool) -> bool:
    """Overwrite ``target`` with what ``wire`` holds, or add it; see ``comm_utils.kernels.decode``.

    Returns:
        False, with nothing done, where there is no kernel for the format or on the device.
    """
    if not (_is_on_gpu(target) and _is_served(codec, block) and _are_plain(target, wire)):
        return False
    if codec in _CASTS and not adds:
        return False
    return _run("decode", codec, target, wire, block, adds, target)


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _is_served(codec: str, block: int) -> bool:
    """Return whether a kernel has this format: triton's tiles are powers of two."""
    return (codec in _LEVELS or codec in _CASTS or codec == "onebit") and block & (block - 1) == 0 and block <= _TILE


def _are_plain(elements: torch.Tensor, wire: torch.Tensor, error: torch.Tensor | None = None) -> bool:
    """Return whether the kernels may go by the addresses of these tensors."""
    floats = (elements,) if error is None else (elements, error)
    return (
        elements.numel() > 0
        and all(one.dtype is torch.float32 and one.is_contiguous() for one in floats)
        and wire.is_contiguous()
        and wire.data_ptr() % 4 == 0
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
