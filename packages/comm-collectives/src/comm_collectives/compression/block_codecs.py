"""Codecs in which the elements of a block share a scale.

On the wire, the float32 scales of all blocks come first, then the elements. A block in which an element is not finite
is decoded as NaN, and one whose scale would not be a normal float32 as zeros. ``comm_backend_ccl`` has the same formats
natively (``native/shared_memory/kernels/codecs.cpp``), with the same bits but for those of a block that is NaN.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from comm_collectives.compression import fused
from comm_collectives.compression.codec import NativeCodec
from comm_collectives.compression.feedback import keep_error
from comm_utils.errors import ArgumentError
from comm_utils.torch_support import factories

__all__ = ["Float8", "Integer", "OneBit"]

_LARGEST_BLOCK = 4096
_LARGEST, _LEAST_NORMAL = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
# Added to a smaller number, it leaves the number's integer, rounded to nearest, ties to even, in the low bits.
_ROUNDER = 12582912.0
# The lanes of the order in which magnitudes are added, whatever the processor has.
_LANES = 16


class _Blocks(NativeCodec):
    """Blocks of ``block_size`` elements, a multiple of 16 up to 4096."""

    bits: int

    def __init__(self, block_size: int) -> None:
        if isinstance(block_size, bool) or not isinstance(block_size, int):
            raise ArgumentError(f"compression: block_size: got {block_size!r}; expected an integer")
        if not 16 <= block_size <= _LARGEST_BLOCK or block_size % 16:
            raise ArgumentError(
                f"compression: block_size: got {block_size}; expected a multiple of 16 up to {_LARGEST_BLOCK}"
            )
        self.granularity = self.block = block_size

    def __repr__(self) -> str:
        return f"{self.name}(block_size={self.granularity})"

    def encoded_bytes(self, count: int) -> int:
        return 4 * -(-count // self.granularity) + -(-count * self.bits // 8)

    def encode(self, source: torch.Tensor, wire: torch.Tensor, error: torch.Tensor | None = None) -> None:
        if wire.numel() != self.encoded_bytes(source.numel()):
            raise ArgumentError(
                f"{self.name}: wire: got {wire.numel()} bytes; expected {self.encoded_bytes(source.numel())}"
            )
        if source.numel() == 0 or fused.encode(self.name, source, wire, self.granularity, error):
            return
        values = source if error is None else source + error
        blocks = self._in_blocks(values)
        scales, elements = self._encoded(blocks, source.numel())
        split = 4 * blocks.shape[0]
        wire[:split].view(torch.float32).copy_(scales)
        wire[split:].copy_(elements.view(-1)[: wire.numel() - split])
        if error is not None:
            keep_error(values, self._decoded(wire, source.numel()), error)

    def decode(self, wire: torch.Tensor, target: torch.Tensor, add: bool = False) -> None:
        if target.numel() == 0 or fused.decode(self.name, wire, target, self.granularity, add):
            return
        decoded = self._decoded(wire, target.numel())
        (target.add_ if add else target.copy_)(decoded)

    def _in_blocks(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values``, padded with zeros, as (blocks, block_size)."""
        missing = -values.numel() % self.granularity
        return torch.nn.functional.pad(values, (0, missing)).view(-1, self.granularity)

    def _decoded(self, wire: torch.Tensor, count: int) -> torch.Tensor:
        blocks = -(-count // self.granularity)
        scales = wire[: 4 * blocks].view(torch.float32)
        elements = wire[4 * blocks :]
        missing = blocks * self.granularity * self.bits // 8 - elements.numel()
        elements = torch.nn.functional.pad(elements, (0, missing)).view(blocks, -1)
        return (self._widened(elements) * scales[:, None]).view(-1)[:count]

    @abstractmethod
    def _encoded(self, blocks: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales and the bytes of the elements, a row for each block."""

    @abstractmethod
    def _widened(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the elements as float32, before they are scaled."""

    def _largest(self, source: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude of the block of each element."""
        largest = self._in_blocks(source).abs().amax(dim=1)
        return largest.repeat_interleave(self.granularity)[: source.numel()]


def _scales(blocks: torch.Tensor, levels: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales with which the largest magnitude of each block is ``levels``, and their inverses."""
    largest = blocks.abs().amax(dim=1)
    # By a tensor: a GPU would multiply by the inverse of a number, which rounds twice.
    scales = largest / largest.new_full((), levels)
    scales.masked_fill_(scales < _LEAST_NORMAL, 0.0)
    too_large = scales * levels > _LARGEST
    scales = torch.where(too_large, scales.nextafter(torch.zeros_like(scales)), scales)
    scales.masked_fill_(~largest.isfinite(), torch.nan)
    inverses = (1.0 / scales).masked_fill_((scales == 0) | scales.isnan(), 0.0)
    return scales, inverses[:, None]


class Float8(_Blocks):
    """8-bit floats by block, scaled so that the block's largest magnitude is the largest of the format.

    The formats are E4M3 and E5M2 of Micikevicius et al., "FP8 Formats for Deep Learning", 2022. With the block's
    largest magnitude *m*, an element loses at most 2⁻⁴ (E4M3) or 2⁻³ (E5M2) of its magnitude, or m/448 · 2⁻¹⁰ and
    m/57344 · 2⁻¹⁷ where that is more.

    Args:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        block_size: elements that share a scale, 8 bits and 32 for the scale.
    """

    bits = 8

    def __init__(self, dtype: torch.dtype, block_size: int = 256) -> None:
        super().__init__(block_size)
        self._dtype = dtype
        is_e4m3 = dtype is torch.float8_e4m3fn
        self.name = "fp8_e4m3" if is_e4m3 else "fp8_e5m2"  # type: ignore[misc]
        self._levels, self._relative, self._step = (
            (448.0, 2.0**-4, 2.0**-10) if is_e4m3 else (57344.0, 2.0**-3, 2.0**-17)
        )

    def _encoded(self, blocks: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales, inverses = _scales(blocks, self._levels)
        return scales, (blocks * inverses).to(self._dtype).view(torch.uint8)

    def _widened(self, elements: torch.Tensor) -> torch.Tensor:
        return elements.view(self._dtype).float()

    def bound(self, source: torch.Tensor) -> torch.Tensor:
        return _with_slack(
            torch.maximum(source.abs() * self._relative, self._largest(source) / self._levels * self._step),
            self._levels,
        )


class Integer(_Blocks):
    """Signed integers by block, between -127 and 127 or -7 and 7, times the block's scale.

    With the block's largest magnitude *m*, an element loses at most m/254 (int8) or m/14 (int4). Two int4 are in a
    byte, the first in its lower half. The format is that of Dettmers et al., "8-bit Optimizers via Block-wise
    Quantization", ICLR 2022, with linear levels.

    Args:
        bits: 8 or 4.
        block_size: elements that share a scale of 32 bits.
    """

    def __init__(self, bits: int, block_size: int = 256) -> None:
        super().__init__(block_size)
        self.bits = bits
        self.name = f"int{bits}"  # type: ignore[misc]
        self._levels = float((1 << (bits - 1)) - 1)

    def _encoded(self, blocks: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales, inverses = _scales(blocks, self._levels)
        integers = (blocks * inverses + _ROUNDER).view(torch.int32)
        if self.bits == 8:
            return scales, integers.to(torch.int8).view(torch.uint8)
        low, high = (integers & 0xF).view(len(blocks), -1, 2).unbind(2)
        return scales, (low | high << 4).to(torch.uint8)

    def _widened(self, elements: torch.Tensor) -> torch.Tensor:
        signed = elements.view(torch.int8)
        if self.bits == 8:
            return signed.float()
        return torch.stack((signed << 4 >> 4, signed >> 4), dim=2).view(len(elements), -1).float()

    def bound(self, source: torch.Tensor) -> torch.Tensor:
        return _with_slack(self._largest(source) / (2 * self._levels), self._levels)


class OneBit(_Blocks):
    """The sign of each element, times the mean magnitude of its block.

    Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; the scale is that of Karimireddy et al., "Error
    Feedback Fixes SignSGD", ICML 2019. An element loses at most the block's largest magnitude: single results are of
    no use, so error feedback is always on. Eight elements are in a byte, the first in the lowest bit; 0 counts as
    positive.

    Args:
        block_size: elements that share a scale of 32 bits.
    """

    name: ClassVar[str] = "onebit"
    needs_feedback: ClassVar[bool] = True
    gathers: ClassVar[bool] = False
    bits = 1

    def __init__(self, block_size: int = 128) -> None:
        super().__init__(block_size)

    def _encoded(self, blocks: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (blocks.abs() * (1.0 / _LARGEST_BLOCK)).view(len(blocks), -1, _LANES)
        sums = torch.zeros_like(parts[:, 0])
        for row in parts.unbind(1):
            sums += row
        half = _LANES // 2
        while half:
            sums = sums[:, :half] + sums[:, half:]
            half //= 2
        counts = factories.full((len(blocks),), float(self.granularity), dtype=torch.float32, device=blocks.device)
        counts[-1] = count - (len(blocks) - 1) * self.granularity
        # The quotient may be rounded up, which would make the mean of the largest numbers infinite.
        scales = (sums.view(-1) * (_LARGEST_BLOCK / counts)).clamp_(max=torch.finfo(torch.float32).max)
        scales.masked_fill_(~blocks.isfinite().all(dim=1), torch.nan)
        positive = (blocks >= 0).to(torch.uint8)
        positive[-1, int(counts[-1]) :] = 0
        weights = 1 << factories.arange(8, dtype=torch.uint8, device=blocks.device)
        return scales, (positive.view(len(blocks), -1, 8) * weights).sum(dim=2, dtype=torch.uint8)

    def _widened(self, elements: torch.Tensor) -> torch.Tensor:
        places = factories.arange(8, dtype=torch.uint8, device=elements.device)
        ones = elements.unsqueeze(2) >> places & 1
        return ones.view(len(elements), -1).float() * 2 - 1

    def bound(self, source: torch.Tensor) -> torch.Tensor:
        return _with_slack(self._largest(source), 1.0)


def _with_slack(bound: torch.Tensor, levels: float) -> torch.Tensor:
    """Return ``bound`` with room for the rounding of the scale, and for blocks that become zeros."""
    return torch.maximum(bound * (1 + 1e-4), torch.full_like(bound, levels * 1.2e-38))
