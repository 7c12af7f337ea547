"""The tensors that a program passed to a call, where the library gets others: another dtype, or several joined in one.

Ranks compare what their programs passed, and records and messages name it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import torch

__all__ = [
    "AS_IT_TRAVELS",
    "Passed",
    "dtype_name",
    "packed_sizes",
    "passed",
    "passing",
    "passing_as",
    "passing_bytes",
    "passing_joined",
]

# Bits of the digest of sizes, and the largest number of tensors above it: together they fit into 63 bits.
_DIGEST_BITS, _MOST = 48, 0x7FFF


class Passed(NamedTuple):
    """The tensor of a call as the program passed it.

    Attributes:
        dtype: None is that of what travels.
        per_element: so many elements travel for each of its.
        joined: of several tensors in one: their number, above a digest of their sizes and dtypes; 0 is one tensor.
    """

    dtype: torch.dtype | None = None
    per_element: int = 1
    joined: int = 0

    def elements(self, travelling: int) -> int:
        """Return the elements that were passed, of which so many travel."""
        return travelling // self.per_element

    @property
    def text(self) -> str:
        """Return how it differs from what travels, as the end of its description; "" where it does not."""
        of = "" if self.dtype is None else f" of {dtype_name(self.dtype)}"
        return of + (f" in {self.joined >> _DIGEST_BITS} tensors" if self.joined else "")

    @property
    def digest(self) -> int:
        """Return 64 bits that differ where ``dtype`` or ``joined`` do, the same in every process."""
        return int.from_bytes(_hashed(f"{self.dtype} {self.joined}".encode(), 64), "little")


#: Nothing but what travels was passed.
AS_IT_TRAVELS = Passed()
_passed: ContextVar[Passed] = ContextVar("passed_tensors", default=AS_IT_TRAVELS)


def passed() -> Passed:
    """Return what the program passed to the call that is made now."""
    return _passed.get()


@contextmanager
def passing(what: Passed) -> Iterator[None]:
    """Have the operations that begin in the block recorded and compared as calls with ``what``."""
    token = _passed.set(what)
    try:
        yield
    finally:
        _passed.reset(token)


def passing_as(tensor: torch.Tensor, wire: torch.Tensor) -> AbstractContextManager[None]:
    """Have the operations that begin in the block, with ``wire``, recorded and compared as calls with ``tensor``."""
    if wire.dtype is tensor.dtype:
        return nullcontext()
    elements = tensor.numel()
    # The tensors of other ranks may have elements where this rank's has none.
    per_element = max(1, wire.numel() // elements if elements else tensor.element_size() // wire.element_size())
    return passing(_passed.get()._replace(dtype=tensor.dtype, per_element=per_element))


def passing_joined(tensors: Sequence[torch.Tensor], sizes: bytes | None = None) -> AbstractContextManager[None]:
    """Have the operations that begin in the block recorded and compared as calls with all these tensors in one.

    Args:
        sizes: of tensors of one dtype, as :func:`packed_sizes` returns them; None asks the tensors.
    """
    return passing(_passed.get()._replace(joined=_joined(tensors, sizes))) if len(tensors) > 1 else nullcontext()


def packed_sizes(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return the number of elements of each, as 8 bytes, least significant first."""
    return struct.pack(f"<{len(tensors)}q", *map(torch.Tensor.numel, tensors))


def passing_bytes(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Do as :func:`passing_joined`, where what travels is the bytes of the tensors, of which there is one at least."""
    what = _passed.get()
    if len(tensors) > 1:
        what = what._replace(joined=_joined(tensors))
    dtype = tensors[0].dtype
    if dtype is not torch.uint8 and all(tensor.dtype is dtype for tensor in tensors):
        what = what._replace(dtype=dtype, per_element=dtype.itemsize)
    return passing(what)


def _joined(tensors: Sequence[torch.Tensor], sizes: bytes | None = None) -> int:
    if sizes is None:
        sizes = packed_sizes(tensors)
        dtypes = [tensor.dtype for tensor in tensors]
        if len(set(dtypes)) > 1:
            sizes += f"{dtypes}".encode()
    digest = int.from_bytes(_hashed(sizes, _DIGEST_BITS), "little")
    return min(len(tensors), _MOST) << _DIGEST_BITS | digest


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


def _hashed(content: bytes, bits: int) -> bytes:
    return hashlib.blake2b(content, digest_size=bits // 8).digest()
