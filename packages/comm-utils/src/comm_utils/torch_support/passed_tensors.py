"""The tensors that a program passed to a call, where the library gets others: another dtype, or several joined in one.

Ranks compare what their programs passed, and records and messages name it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import NamedTuple

import torch

__all__ = [
    "AS_IT_TRAVELS",
    "Passed",
    "dtype_name",
    "packed_sizes",
    "passed",
    "passed_sizes",
    "passing",
    "passing_as",
    "passing_bytes",
    "passing_joined",
    "passing_packed",
]

# Bits of the digest of sizes, and the largest number of tensors above it: together they fit into 63 bits.
_DIGEST_BITS, _MOST = 48, 0x7FFF
# Bytes of sizes whose digest is remembered.
_MOST_REMEMBERED = 64 << 10


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
        return _digest_of(self.dtype, self.joined)


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
    if len(tensors) < 2:
        return nullcontext()
    return passing_packed(_described(tensors) if sizes is None else sizes, len(tensors))


def passing_packed(sizes: bytes, count: int | None = None) -> AbstractContextManager[None]:
    """Do as :func:`passing_joined` for tensors of these ``sizes``, of which ``count`` is the number."""
    count = len(sizes) // 8 if count is None else count
    return passing(_passed.get()._replace(joined=_joined(sizes, count))) if count > 1 else nullcontext()


def passed_sizes(sizes: bytes) -> Passed:
    """Return what :func:`passing_packed` has recorded and compared."""
    return Passed(joined=_joined(sizes, len(sizes) // 8))


def packed_sizes(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return the number of elements of each, as 8 bytes, least significant first."""
    return struct.pack(f"<{len(tensors)}q", *map(torch.Tensor.numel, tensors))


def passing_bytes(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Do as :func:`passing_joined`, where what travels is the bytes of the tensors, of which there is one at least."""
    what = _passed.get()
    if len(tensors) > 1:
        what = what._replace(joined=_joined(_described(tensors), len(tensors)))
    dtype = tensors[0].dtype
    if dtype is not torch.uint8 and all(tensor.dtype is dtype for tensor in tensors):
        what = what._replace(dtype=dtype, per_element=dtype.itemsize)
    return passing(what)


def _described(tensors: Sequence[torch.Tensor]) -> bytes:
    sizes, dtypes = packed_sizes(tensors), [tensor.dtype for tensor in tensors]
    return sizes + f"{dtypes}".encode() if len(set(dtypes)) > 1 else sizes


def _joined(sizes: bytes, count: int) -> int:
    return (_joined_again if len(sizes) <= _MOST_REMEMBERED else _joined_again.__wrapped__)(sizes, count)


# A program joins the same tensors again and again.
@lru_cache(maxsize=64)
def _joined_again(sizes: bytes, count: int) -> int:
    return min(count, _MOST) << _DIGEST_BITS | int.from_bytes(_hashed(sizes, _DIGEST_BITS), "little")


@lru_cache(maxsize=64)
def _digest_of(dtype: torch.dtype | None, joined: int) -> int:
    return int.from_bytes(_hashed(f"{dtype} {joined}".encode(), 64), "little")


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


def _hashed(content: bytes, bits: int) -> bytes:
    return hashlib.blake2b(content, digest_size=bits // 8).digest()
