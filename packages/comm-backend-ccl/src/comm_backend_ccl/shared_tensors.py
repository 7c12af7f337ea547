"""Ordinary tensors whose memory the other ranks of a host can reach."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence

import torch

from comm_backend_ccl import shared_memory
from comm_utils.errors import BackendUnavailableError

__all__ = ["empty_shared"]


def empty_shared(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a new, uninitialised tensor; its memory is used again for others when no tensor needs it any more.

    Raises:
        BackendUnavailableError: there is not enough shared memory, and it says how much is needed; or this is a forked
            child.
    """
    elements = math.prod(shape)
    size = elements * dtype.itemsize
    if not size:
        return torch.empty(tuple(shape), dtype=dtype)
    try:
        address = shared_memory.allocate(size)
    except (MemoryError, RuntimeError) as error:
        raise BackendUnavailableError(f"empty_shared: {error}") from error
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, shared_memory.give_back, address).atexit = False
    # Which keeps `memory`, and goes through bytes as it does not know all dtypes.
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(tuple(shape))
