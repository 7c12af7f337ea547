"""One pass over the elements for an encoding or decoding, where somebody has a kernel for it."""

from __future__ import annotations

import torch

from comm_collectives.compression import device_kernels
from comm_utils import kernels

__all__ = ["decode", "encode"]


def encode(codec: str, source: torch.Tensor, wire: torch.Tensor, block: int, error: torch.Tensor | None) -> bool:
    """See ``comm_utils.kernels.encode``.

    Returns:
        False, with nothing done, where there is no kernel for this format on this device.
    """
    kernel = device_kernels.encode if source.is_cuda else kernels.encode
    return kernel(codec, source, wire, block, error)


def decode(codec: str, wire: torch.Tensor, target: torch.Tensor, block: int, adds: bool) -> bool:
    """See ``comm_utils.kernels.decode``.

    Returns:
        False, with nothing done, where there is no kernel for this format on this device.
    """
    kernel = device_kernels.decode if target.is_cuda else kernels.decode
    return kernel(codec, wire, target, block, adds)
