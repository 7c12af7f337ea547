"""Ordinary tensors whose memory the other ranks of a host can reach."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch

from comm_backend_ccl import shared_memory
from comm_utils.errors import BackendUnavailableError
from comm_utils.torch_support import factories

__all__ = ["empty_shared", "shared_memory_stats", "tensor_at"]

_MOST_BYTES = 2**62


def empty_shared(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a new, uninitialised tensor; its memory is used again for others when no tensor needs it any more.

    Raises:
        BackendUnavailableError: there is not enough shared memory, and it says how much is needed; or this is a forked
            child.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return factories.empty(tuple(shape), dtype=dtype, device="cpu")
    if size > _MOST_BYTES:
        raise BackendUnavailableError(
            f"empty_shared: a tensor of shape {tuple(shape)} and {dtype} needs {size >> 20} MiB of shared memory, more "
            "than any process can address"
        )
    try:
        block = shared_memory.allocate(size)
    except (MemoryError, OSError, RuntimeError) as error:
        raise BackendUnavailableError(f"empty_shared: {error}") from error
    # Through bytes, as torch does not take memory for each dtype.
    return tensor_at(block.address, size, block).view(dtype).view(tuple(shape))


def tensor_at(address: int, size: int, owner: object) -> torch.Tensor:
    """Return ``size`` bytes of memory as a tensor, uint8, (size,), which keeps their ``owner``."""
    memory: Any = (ctypes.c_char * size).from_address(address)
    memory.owner = owner
    return torch.frombuffer(memory, dtype=torch.uint8)


def shared_memory_stats() -> dict[str, int]:
    """Return the statistics of this process's shared tensors, see ``comm_collectives.shared_memory_stats``."""
    return shared_memory.statistics()
