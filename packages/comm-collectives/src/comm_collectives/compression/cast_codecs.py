"""Codecs that change the dtype of each element by itself."""

from __future__ import annotations

from typing import ClassVar

import torch

from comm_collectives.compression import fused
from comm_collectives.compression.codec import Codec, NativeCodec
from comm_collectives.compression.feedback import keep_error

__all__ = ["BFloat16", "Float16", "Uncompressed"]


class Uncompressed(Codec):
    """Every element as it is, in 4 bytes."""

    name: ClassVar[str] = "none"

    def encoded_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, source: torch.Tensor, wire: torch.Tensor, error: torch.Tensor | None = None) -> None:
        target = wire.view(torch.float32)
        if error is None:
            target.copy_(source)
        else:
            torch.add(source, error, out=target)
            error.zero_()

    def decode(self, wire: torch.Tensor, target: torch.Tensor, add: bool = False) -> None:
        (target.add_ if add else target.copy_)(wire.view(torch.float32))

    def bound(self, source: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(source)


class _Cast(NativeCodec):
    """Every element in a 16-bit dtype, rounded to nearest, ties to even."""

    dtype: ClassVar[torch.dtype]

    def encoded_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, source: torch.Tensor, wire: torch.Tensor, error: torch.Tensor | None = None) -> None:
        if fused.encode(self.name, source, wire, 16, error):
            return
        target = wire.view(self.dtype)
        if error is None:
            target.copy_(source)
            return
        values = source + error
        target.copy_(values)
        keep_error(values, target.float(), error)

    def decode(self, wire: torch.Tensor, target: torch.Tensor, add: bool = False) -> None:
        if not fused.decode(self.name, wire, target, 16, add):
            source = wire.view(self.dtype)
            (target.add_(source.float()) if add else target.copy_(source))


class Float16(_Cast):
    """IEEE 754 binary16: 11 bits of precision, magnitudes up to 65504.

    An element loses at most 2⁻¹¹ of its magnitude, or 2⁻²⁵ below 2⁻¹⁴. Larger ones than 65504 become infinite.
    """

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16

    def bound(self, source: torch.Tensor) -> torch.Tensor:
        magnitude = source.abs()
        return (magnitude * 2.0**-11).clamp_min(2.0**-25).masked_fill(magnitude > 65504, torch.inf)


class BFloat16(_Cast):
    """The upper half of a float32: 8 bits of precision and the range of float32.

    An element loses at most 2⁻⁸ of its magnitude, or 2⁻¹³⁴ below 2⁻¹²⁶. Those above 3.38e38 may become infinite.
    """

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16

    def bound(self, source: torch.Tensor) -> torch.Tensor:
        magnitude = source.abs()
        return (magnitude * 2.0**-8).clamp_min(2.0**-134).masked_fill(magnitude > 3.38e38, torch.inf)
