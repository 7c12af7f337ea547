"""Tensors that every rank can derive: their elements from a key, their place in memory from a layout.

Nothing here uses the packages under test.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence

import torch

__all__ = ["DENSE_LAYOUTS", "READ_LAYOUTS", "Placed", "dtype_of", "generator", "random_bits", "same_bits"]

#: For tensors that are written: every element in one stretch of memory.
DENSE_LAYOUTS = ("contiguous", "offset", "permuted", "grad", "inference")
#: For tensors that are only read.
READ_LAYOUTS = (*DENSE_LAYOUTS, "strided", "expanded", "conjugated", "negated")

_GUARD = 3  # elements on either side of a tensor that is not alone in its memory


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found


def generator(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def random_bits(shape: Sequence[int], dtype: torch.dtype, *key: object) -> torch.Tensor:
    """Elements of any bit pattern that the dtype can have, NaNs and infinities included."""
    count = math.prod(shape) * dtype.itemsize
    memory = torch.randint(256, (count,), dtype=torch.uint8, generator=generator(key))
    if dtype == torch.bool:
        memory &= 1
    return memory.view(dtype).view(tuple(shape))


def as_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as bytes."""
    # Cloned because a dimension of one or no element may have any stride, which view() minds.
    return tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors have the same elements, bit for bit, whatever their layouts and shapes."""
    assert found.dtype == expected.dtype, f"dtype {found.dtype}, expected {expected.dtype}"
    return torch.equal(as_memory(_plain(found)), as_memory(_plain(expected)))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


class Placed:
    """``values`` laid out in memory of its own, which remembers what it was.

    Attributes:
        tensor: what is given to the call under test.
        values: its elements, contiguous; where the layout repeats elements, not those that were asked for.
    """

    def __init__(self, values: torch.Tensor, layout: str) -> None:
        self.values = values
        self.tensor, self.layout = self._place(values, layout)
        # Zero-sized tensors have no storage worth looking at.
        self._memory = torch.empty(0, dtype=torch.uint8).set_(self.tensor.detach().untyped_storage())  # type: ignore[call-overload]
        self.remember()

    def _place(self, values: torch.Tensor, layout: str) -> tuple[torch.Tensor, str]:
        dtype, shape = values.dtype, values.shape
        if layout == "offset":
            return _within(values, range(values.dim())), layout
        if layout == "permuted" and values.dim() > 1:
            # channels_last where there are four dimensions
            order = (0, 2, 3, 1) if values.dim() == 4 else tuple(reversed(range(values.dim())))
            return _within(values, order), layout
        if layout == "grad" and (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1:
            return values.clone().requires_grad_(), layout
        if layout == "inference":
            with torch.inference_mode():
                return values.clone(), layout
        if layout == "strided" and values.dim():
            gaps = random_bits((*shape[:-1], shape[-1] * 2), dtype, "gaps")
            gaps[..., ::2] = values
            return gaps[..., ::2], layout
        if layout == "expanded" and values.dim() and shape[0]:
            self.values = values[:1].expand(shape).clone(memory_format=torch.contiguous_format)
            return values[:1].clone().expand(shape), layout
        if layout == "conjugated" and dtype in (torch.complex64, torch.complex128):
            lazily = values.conj_physical().clone().conj()
            assert lazily.is_conj()
            return lazily, layout
        if layout == "negated" and dtype in (torch.float32, torch.float64):
            # The imaginary part of a lazily conjugated tensor is a lazily negated view.
            lazily = torch.complex(torch.zeros_like(values), -values).conj().imag
            assert lazily.is_neg()
            return lazily, layout
        return values.clone(), "contiguous"

    def remember(self) -> None:
        """Take this memory as it is now for what it was before the call."""
        self._before = self._memory.clone()

    def assert_untouched(self, what: str) -> None:
        """Nothing in this memory has changed."""
        assert torch.equal(self._memory, self._before), f"{what}: memory that is only read was written ({self.layout})"

    def assert_surroundings_untouched(self, what: str) -> None:
        """Nothing beside the tensor has changed."""
        size = self.tensor.element_size()
        first = self.tensor.storage_offset() * size
        after = first + self.tensor.numel() * size
        for part in (slice(0, first), slice(after, None)):
            assert torch.equal(self._memory[part], self._before[part]), f"{what}: wrote beside a tensor ({self.layout})"


def _within(values: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A tensor whose dimensions lie in memory in this ``order``, the outermost first, between guards."""
    memory = random_bits((values.numel() + 2 * _GUARD,), values.dtype, "guard")
    sizes = [values.shape[dim] for dim in order]
    strides = list(itertools.accumulate(reversed(sizes[1:]), lambda a, b: a * b, initial=1))[::-1] if sizes else []
    by_dim = dict(zip(order, strides, strict=True))
    placed = memory.as_strided(tuple(values.shape), [by_dim[dim] for dim in range(values.dim())], _GUARD)
    placed.copy_(values)
    return placed
