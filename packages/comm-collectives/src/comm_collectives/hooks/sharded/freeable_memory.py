"""Memory that is freed while tensors still share it, such as what autograd saved of a parameter in stage 3.

A storage that ``resize_(0)`` made empty ends the process when a tensor that shares it is read: torch's kernels do not
look for memory that is missing. On the CPU, this memory is a mapping instead, whose address stays. Freeing replaces its
pages with those of one small file, in which every float is NaN; the kernel takes the pages back.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache

import torch

__all__ = ["FreeableMemory"]

# How much of the file's content is in memory, once in each process; 1 GiB takes 512 mappings of the 65530 of a process.
_FILLING_BYTES = 2 << 20
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_PRIVATE = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE


class FreeableMemory:
    """Flat memory of one tensor, with zeros at first.

    Args:
        numel, dtype, device: of the tensor.

    Attributes:
        tensor: (numel,). While the memory is freed, tensors that share it read NaN on the CPU, and -1 as integers; what
            is written to them is lost. On other devices they have an empty storage.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._size_bytes = numel * dtype.itemsize
        self._mapping: mmap.mmap | None = None
        if device.type == "cpu" and numel and sys.platform == "linux":
            self._mapping = mmap.mmap(-1, self._size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.tensor = torch.frombuffer(self._mapping, dtype=dtype, count=numel)
            self._address = self.tensor.data_ptr()
        else:
            self.tensor = torch.zeros(numel, dtype=dtype, device=device)
        self._is_free = False

    @property
    def references(self) -> int:
        """Return how many tensors share the memory, as Python's variables or in a graph of autograd."""
        count: int = torch._C._storage_Use_Count(self.tensor.untyped_storage()._cdata)
        return count

    def allocate(self) -> None:
        """Have memory again after :meth:`free`, with any values; nothing to do where it was not freed."""
        if not self._is_free:
            return
        self._is_free = False
        if self._mapping is None:
            self.tensor.untyped_storage().resize_(self._size_bytes)
        else:
            _map(self._address, self._size_bytes, -1)

    def free(self) -> None:
        """Give the memory back."""
        if self._is_free:
            return
        if self._mapping is None:
            self.tensor.untyped_storage().resize_(0)
        elif self.tensor.data_ptr() != self._address:
            return  # share_memory_() has moved it, for other processes to keep
        else:
            _fill(self._address, self._size_bytes)
        self._is_free = True


def _fill(address: int, size_bytes: int) -> None:
    try:
        file = _filling()
        for start in range(0, size_bytes, _FILLING_BYTES):
            _map(address + start, min(_FILLING_BYTES, size_bytes - start), file)
    except OSError:  # no such files here, or too many mappings: pages of zeros
        _map(address, size_bytes, -1)


def _map(address: int, size_bytes: int, file: int) -> None:
    """Replace pages with those of ``file``, or with new ones where it is -1."""
    flags = _PRIVATE if file >= 0 else _PRIVATE | mmap.MAP_ANONYMOUS
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc().mmap(address, size_bytes, protection, flags, file, 0) != address:
        raise OSError(ctypes.get_errno(), f"mmap of {size_bytes} bytes: {os.strerror(ctypes.get_errno())}")


@cache
def _libc() -> ctypes.CDLL:
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    found.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    )  # fmt: skip
    return found


@cache
def _filling() -> int:
    file = os.memfd_create("comm-freed-parameters")
    os.write(file, b"\xff" * _FILLING_BYTES)
    return file
