"""PowerSGD: an all_reduce of two narrow factors in place of the reduction of a matrix.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019, algorithm 1, with the warm start of section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from comm_collectives.compression.members import Members
from comm_collectives.memory import concatenate
from comm_utils.torch_support import factories

__all__ = [
    "LowRank",
    "LowRankReduction",
    "factor_elements",
    "matrix_shape",
    "memory_shape",
    "stacked_shape",
]


@dataclass
class LowRank:
    """The state of one tensor.

    Attributes:
        local: what the factors have lost of what this rank sent, float32, as many elements as the tensor.
        factor: the second factor of the last call, float32, (columns, rank), the same on every rank; empty at first.
        average, members, padding: see ``feedback.Feedback``.
    """

    local: torch.Tensor
    factor: torch.Tensor
    average: bool = False
    members: Members | None = None
    padding: int = 0

    @property
    def count(self) -> int:
        """Elements of the tensor."""
        return self.local.numel()

    def move_to(self, device: torch.device) -> None:
        """Move the state to ``device``, that of its tensor; a saved one may come from another."""
        self.local, self.factor = self.local.to(device), self.factor.to(device)

    def fit(self, count: int, padding: int) -> None:
        """See ``feedback.Feedback.fit``."""
        if self.count == count - padding:
            self.local = torch.nn.functional.pad(self.local, (0, padding))


def memory_shape(tensor: torch.Tensor) -> torch.Size:
    """Return the shape of a dense tensor with its dimensions in the order of its memory."""
    if tensor.is_contiguous():
        return tensor.shape
    dimensions = sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)
    return torch.Size([size for _, size in dimensions if size > 1])


def stacked_shape(shapes: Sequence[torch.Size]) -> torch.Size:
    """Return the shape of contiguous tensors one below the other; of one dimension where their rows do not match."""
    if len({shape[1:] for shape in shapes}) == 1 and len(shapes[0]) >= 2:
        return torch.Size([sum(shape[0] for shape in shapes), *shapes[0][1:]])
    return torch.Size([sum(math.prod(shape) for shape in shapes)])


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


@dataclass(frozen=True)
class LowRankReduction:
    """The reduction of one tensor, which every rank of a group does.

    Attributes:
        reduce: sums a float32 tensor over all ranks, in place, to the same bits on each.
        shape: of the tensor, its dimensions in the order of its memory.
        average: divide by ``size``, the number of ranks.
        rank: of the approximation.
    """

    reduce: Callable[[torch.Tensor], None]
    shape: torch.Size
    average: bool
    size: int
    rank: int
    state: LowRank

    def all_reduce(self, elements: torch.Tensor) -> None:
        """Overwrite ``elements``, (n,), of the tensor with a low-rank approximation of their sum or average."""
        if factor_elements(self.shape, self.rank) == 0:
            whole = self._take_losses(elements)
            self.reduce(whole)
            elements.copy_(whole / self.size if self.average else whole)
            return
        left, right = self._factors(elements)
        elements.copy_((left @ right.T).view(-1)[: elements.numel()])

    def reduce_scatter(
        self,
        scatter: Callable[[torch.Tensor, Sequence[torch.Tensor]], None],
        output: torch.Tensor,
        slices: Sequence[torch.Tensor],
        own: int,
    ) -> None:
        """Overwrite ``output``, (m,), with slice ``own`` of what :meth:`all_reduce` makes of the ``slices`` as a whole.

        Args:
            scatter: sums entry r of every rank's float32 tensors into the first argument of rank r.
            slices: the elements of the tensor, one after the other.
        """
        elements, counts = concatenate(slices), [one.numel() for one in slices]
        if factor_elements(self.shape, self.rank) == 0:
            total = factories.empty(output.numel(), dtype=torch.float32, device=output.device)
            scatter(total, torch.split(self._take_losses(elements), counts))
            output.copy_(total / self.size if self.average else total)
            return
        left, right = self._factors(elements)
        columns, begin = len(right), sum(counts[:own])
        end = begin + counts[own]
        first = begin // columns
        rows = left[first : -(-end // columns)] @ right.T
        output.copy_(rows.view(-1)[begin - first * columns : end - first * columns])

    def _take_losses(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the elements with what was lost of earlier ones, as float32, to be sent as they are."""
        whole = elements.float() + self.state.local
        self.state.local.zero_()
        return whole

    def _factors(self, elements: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors, (rows, width) and (columns, width), of the sum or average of the ranks' matrices."""
        state = self.state
        count = elements.numel()
        rows, columns = matrix_shape(self.shape)
        padded = factories.zeros(rows * columns, dtype=torch.float32, device=elements.device)
        torch.add(elements.float(), state.local, out=padded[:count])
        matrix = padded.view(rows, columns)
        width = min(self.rank, rows, columns)
        if state.factor.shape != (columns, width):
            # The same on every rank.
            random = torch.Generator("cpu").manual_seed(columns * 1_000_003 + width)
            made = factories.randn(columns, width, generator=random, dtype=torch.float32, device="cpu")
            state.factor = made.to(elements.device)
        left = matrix @ torch.linalg.qr(state.factor).Q
        self.reduce(left)
        left = torch.linalg.qr(left).Q
        own = matrix.T @ left
        state.local.copy_((matrix - left @ own.T).view(-1)[:count])
        state.local.masked_fill_(~state.local.isfinite(), 0.0)
        total = own
        self.reduce(total)
        mean = total / self.size
        # One that is not finite would stay so for ever; every rank has the same bits, and begins anew.
        state.factor = mean if mean.isfinite().all() else mean.new_zeros(0, 0)
        return left, mean if self.average else total
