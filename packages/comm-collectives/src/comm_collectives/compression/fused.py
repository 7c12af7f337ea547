"""One pass over the elements for an encoding or decoding, where somebody has a kernel for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from comm_collectives.compression import device_kernels
from comm_utils import kernels
from comm_utils.torch_support.flattening import count_versions

__all__ = ["decode", "decode_reduce_encode", "encode"]


def encode(codec: str, source: torch.Tensor, wire: torch.Tensor, block: int, error: torch.Tensor | None) -> bool:
    """See ``comm_utils.kernels.encode``.

    Returns:
        False, with nothing done, where there is no kernel for this format on this device.
    """
    kernel = device_kernels.encode if source.is_cuda else kernels.encode
    return kernel(codec, source, wire, block, error) and _written(wire, error)


def decode(codec: str, wire: torch.Tensor, target: torch.Tensor, block: int, adds: bool) -> bool:
    """See ``comm_utils.kernels.decode``.

    Returns:
        False, with nothing done, where there is no kernel for this format on this device.
    """
    kernel = device_kernels.decode if target.is_cuda else kernels.decode
    return kernel(codec, wire, target, block, adds) and _written(target)


def decode_reduce_encode(
    codec: str,
    wires: Sequence[torch.Tensor],
    total: torch.Tensor,
    divisor: int,
    wire: torch.Tensor,
    block: int,
    error: torch.Tensor | None,
) -> bool:
    """See ``comm_utils.kernels.decode_reduce_encode``.

    Returns:
        False, with nothing done, where there is no kernel for this format on this device.
    """
    done = kernels.decode_reduce_encode(codec, wires, total, divisor, wire, block, error)
    return done and _written(total, wire, error)


def _written(*tensors: torch.Tensor | None) -> bool:
    """Count new versions, as torch does where it writes: autograd then refuses a backward that needs the values before.

    Returns:
        True.
    """
    count_versions([one for one in tensors if one is not None and not one.is_inference()])
    return True
