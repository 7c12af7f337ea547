"""A codec that sends the largest elements alone."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from comm_collectives.compression.codec import Codec
from comm_utils.errors import ArgumentError, CollectiveMismatchError

__all__ = ["TopK"]


class TopK(Codec):
    """The elements of the largest magnitude, exactly, with their places; the others are zeros.

    Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; error feedback, which is
    always on, keeps what was not sent. On the wire, the int32 places come first, then the float32 elements. An element
    loses at most its own magnitude, and none that is larger than one of its piece that was sent.

    Args:
        ratio: the share of elements that are sent, of each piece, rounded up. On the CPU, a piece has at most 1,048,576
            elements; on GPUs, up to 33,554,432 divided by the ranks where that is more.
    """

    name: ClassVar[str] = "topk"
    needs_feedback: ClassVar[bool] = True
    gathers: ClassVar[bool] = False

    def __init__(self, ratio: float = 0.01) -> None:
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
            raise ArgumentError(f"compression: ratio: got {ratio!r}; expected more than 0 and at most 1")
        self.ratio = float(ratio)

    def __repr__(self) -> str:
        return f"{self.name}(ratio={self.ratio!r})"

    def _sent(self, count: int) -> int:
        return min(count, math.ceil(count * self.ratio))

    def encoded_bytes(self, count: int) -> int:
        return 8 * self._sent(count)

    def encode(self, source: torch.Tensor, wire: torch.Tensor, error: torch.Tensor | None = None) -> None:
        values = source if error is None else source + error
        k = self._sent(values.numel())
        places = values.abs().topk(k, sorted=False).indices
        wire[: 4 * k].view(torch.int32).copy_(places)
        wire[4 * k :].view(torch.float32).copy_(values[places])
        if error is not None:
            error.copy_(values)
            error[places] = 0.0
            error.masked_fill_(~error.isfinite(), 0.0)

    def decode(self, wire: torch.Tensor, target: torch.Tensor, add: bool = False) -> None:
        k = self._sent(target.numel())
        # A peer's places are not trusted to lie inside of the tensor: index_add_ refuses those that do not.
        places, values = wire[: 4 * k].view(torch.int32), wire[4 * k : 8 * k].view(torch.float32)
        if not add:
            target.zero_()
        try:
            target.index_add_(0, places, values)
        except (IndexError, RuntimeError) as error:
            raise CollectiveMismatchError(
                f"compression: {self!r}: a peer sent elements for places that a tensor of {target.numel()} elements "
                f"does not have [{error!s:.80}]; check that every rank runs the same release of comm-collectives"
            ) from error

    def bound(self, source: torch.Tensor) -> torch.Tensor:
        magnitude = source.abs()
        k = self._sent(source.numel())
        if k == 0:
            return magnitude
        least = magnitude.topk(k).values[-1]
        return magnitude.clamp_max(least)
