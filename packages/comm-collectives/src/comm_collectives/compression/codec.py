"""The interface of a codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from comm_collectives.compression import fused

__all__ = ["Codec", "NativeCodec"]


class Codec(ABC):
    """A format of float32 elements on the wire.

    Ranks encode pieces of tensors and decode those of others; sums are made in float32 in between. A subclass has no
    state: what an encoding loses is kept by its caller, for error feedback.

    Attributes:
        name: the name under which users ask for it.
        granularity: pieces of a tensor begin at multiples of so many elements.
        needs_feedback: results are useless without error feedback, which is therefore always on.
        gathers: it serves collectives that only move data; the others need error feedback.
    """

    name: ClassVar[str]
    granularity: int = 1
    needs_feedback: ClassVar[bool] = False
    gathers: ClassVar[bool] = True

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """Return the bytes on the wire for ``count`` elements."""

    @abstractmethod
    def encode(self, source: torch.Tensor, wire: torch.Tensor, error: torch.Tensor | None = None) -> None:
        """Overwrite ``wire`` with ``source``.

        Args:
            source: float32, (n,), contiguous; only read.
            wire: uint8, (encoded_bytes(n),), contiguous, aligned to 16 bytes.
            error: float32, (n,): added to ``source`` before it is encoded, and overwritten with what the encoding
                loses, 0 where that is not finite. None encodes ``source`` alone.
        """

    @abstractmethod
    def decode(self, wire: torch.Tensor, target: torch.Tensor, add: bool = False) -> None:
        """Overwrite ``target``, float32, (n,), with what ``wire`` holds, or add it to ``target``."""

    def decode_reduce_encode(
        self,
        wires: Sequence[torch.Tensor],
        total: torch.Tensor,
        divisor: int,
        wire: torch.Tensor,
        error: torch.Tensor | None = None,
    ) -> None:
        """Add what ``wires`` hold to ``total``, in their order, divide it by ``divisor``, and encode it into ``wire``.

        A codec may do this in fewer passes, to the same bits.

        Args:
            total: float32, (n,), contiguous; overwritten with what is decoded from ``wire``.
            wire, error: see :meth:`encode`.
        """
        for one in wires:
            self.decode(one, total, add=True)
        if divisor != 1:
            total.div_(divisor)
        self.encode(total, wire, error)
        self.decode(wire, total)

    @abstractmethod
    def bound(self, source: torch.Tensor) -> torch.Tensor:
        """Return the largest error of each element of ``source``, float32, (n,), finite, after encoding and decoding.

        Where an element may become infinite, because it is too large for the format, its bound is.
        """

    def __repr__(self) -> str:
        """Return what ranks have to agree on: the name and all options."""
        return self.name

    def describe(self) -> str:
        """Return what ranks compare: ``repr()``, and of a codec of another package also its class and its sizes.

        Ranks may have other packages of that name, or other versions; those of this library are compared at the start.
        """
        kind, count = type(self), 256 * max(1, self.granularity)
        if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
            return repr(self)
        sizes = f"{self.encoded_bytes(count)} bytes for {count} elements"
        return f"{self!r} ({kind.__module__}.{kind.__qualname__}, {sizes})"


class NativeCodec(Codec):
    """A codec of a format that installed kernels may have.

    Attributes:
        block: elements that share a scale, for kernels; those without scales look at none.
    """

    block: int = 16

    def decode_reduce_encode(
        self,
        wires: Sequence[torch.Tensor],
        total: torch.Tensor,
        divisor: int,
        wire: torch.Tensor,
        error: torch.Tensor | None = None,
    ) -> None:
        if not fused.decode_reduce_encode(self.name, wires, total, divisor, wire, self.block, error):
            super().decode_reduce_encode(wires, total, divisor, wire, error)
