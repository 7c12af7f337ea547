"""PowerSGD: an all_reduce of two narrow factors in place of a matrix.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019, algorithm 1, with the warm start of section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from comm_collectives.compression.members import Members
from comm_utils.torch_support import factories

__all__ = ["LowRank", "all_reduce", "factor_elements", "matrix_shape", "memory_shape"]


@dataclass
class LowRank:
    """The state of one tensor.

    Attributes:
        local: what the factors have lost of what this rank sent, float32, as many elements as the tensor.
        factor: the second factor of the last call, float32, (columns, rank), the same on every rank; empty at first.
        average, members: see ``feedback.Feedback``.
    """

    local: torch.Tensor
    factor: torch.Tensor
    average: bool = False
    members: Members | None = None

    @property
    def count(self) -> int:
        """Elements of the tensor."""
        return self.local.numel()

    def move_to(self, device: torch.device) -> None:
        """Move the state to ``device``, that of its tensor; a saved one may come from another."""
        self.local, self.factor = self.local.to(device), self.factor.to(device)


def memory_shape(tensor: torch.Tensor) -> torch.Size:
    """Return the shape of a dense tensor with its dimensions in the order of its memory."""
    if tensor.is_contiguous():
        return tensor.shape
    dimensions = sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)
    return torch.Size([size for _, size in dimensions if size > 1])


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return the rows and columns of the matrix that a tensor is taken for.

    The first dimension by all others; a tensor of one dimension is made nearly square, and padded with zeros.

    Args:
        shape: of the tensor, its dimensions in the order of its memory.
    """
    count = math.prod(shape)
    if len(shape) >= 2 and shape[0] > 1 and count > shape[0]:
        return shape[0], count // shape[0]
    rows = max(1, math.isqrt(count))
    return rows, -(-count // rows)


def factor_elements(shape: torch.Size, rank: int) -> int:
    """Return how many float32 travel for a tensor, each in a sum over all ranks; 0 where that would be no fewer."""
    rows, columns = matrix_shape(shape)
    sent = min(rank, rows, columns) * (rows + columns)
    return sent if sent < math.prod(shape) else 0


def all_reduce(
    reduce: Callable[[torch.Tensor], None],
    tensor: torch.Tensor,
    elements: torch.Tensor,
    average: bool,
    size: int,
    rank: int,
    state: LowRank,
) -> None:
    """Overwrite ``elements``, (n,), those of ``tensor``, with a low-rank approximation of their sum or average.

    Args:
        reduce: sums a float32 tensor over all ranks, in place, to the same bits on each.
        size: the number of ranks.
        rank: of the approximation.
    """
    shape, count = memory_shape(tensor), elements.numel()
    rows, columns = matrix_shape(shape)
    if factor_elements(shape, rank) == 0:
        whole = elements.float() + state.local
        reduce(whole)
        state.local.zero_()
        elements.copy_(whole / size if average else whole)
        return
    padded = factories.zeros(rows * columns, dtype=torch.float32, device=elements.device)
    torch.add(elements.float(), state.local, out=padded[:count])
    matrix = padded.view(rows, columns)
    width = min(rank, rows, columns)
    if state.factor.shape != (columns, width):
        # The same on every rank.
        random = torch.Generator("cpu").manual_seed(columns * 1_000_003 + width)
        made = factories.randn(columns, width, generator=random, dtype=torch.float32, device="cpu")
        state.factor = made.to(elements.device)
    left = matrix @ torch.linalg.qr(state.factor).Q
    reduce(left)
    left = torch.linalg.qr(left).Q
    own = matrix.T @ left
    state.local.copy_((matrix - left @ own.T).view(-1)[:count])
    state.local.masked_fill_(~state.local.isfinite(), 0.0)
    total = own
    reduce(total)
    mean = total / size
    # One that is not finite would stay so for ever; every rank has the same bits, and begins anew.
    state.factor = mean if mean.isfinite().all() else mean.new_zeros(0, 0)
    elements.copy_((left @ (mean if average else total).T).view(-1)[:count])
