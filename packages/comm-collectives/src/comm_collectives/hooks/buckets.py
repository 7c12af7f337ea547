"""Buckets: which tensors are communicated together, and flat memory with a view for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comm_collectives.annotations import Group
from comm_collectives.memory import is_dense
from comm_collectives.shared_tensors import empty_shared
from comm_utils.torch_support import factories

__all__ = ["ALIGNMENT_BYTES", "FlatLayout", "Span", "assign_buckets", "flat_layout", "flat_memory", "view_of"]

#: Tensors begin at multiples of this in flat memory: a cache line, and the widest vector registers.
ALIGNMENT_BYTES = 64


def assign_buckets(
    tensors: Sequence[torch.Tensor], bucket_size_bytes: int, first_bucket_size_bytes: int | None = None
) -> list[list[int]]:
    """Return the positions in ``tensors`` that each bucket holds, in the order in which buckets become complete.

    A bucket has tensors of one dtype on one device. It ends with the tensor that makes it as large as its limit, so a
    larger tensor has a bucket that is larger (Li et al. 2020, PyTorch Distributed, section 3.2.2).

    Args:
        tensors: in the order in which they become ready.
        bucket_size_bytes: the limit of a bucket.
        first_bucket_size_bytes: that of the first bucket of each dtype and device; None for ``bucket_size_bytes``. A
            small one lets communication begin early.
    """
    finished: list[list[int]] = []
    growing: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    limits: dict[tuple[torch.dtype, torch.device], int] = {}
    for position, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        limit = limits.setdefault(
            kind, bucket_size_bytes if first_bucket_size_bytes is None else first_bucket_size_bytes
        )
        members, size_bytes = growing.pop(kind, ([], 0))
        members.append(position)
        size_bytes += tensor.numel() * tensor.element_size()
        if size_bytes < limit:
            growing[kind] = members, size_bytes
            continue
        finished.append(members)
        limits[kind] = bucket_size_bytes
    finished += [members for members, _ in growing.values()]
    return sorted(finished, key=lambda members: members[-1])


@dataclass(frozen=True)
class Span:
    """The place of one tensor in flat memory, in elements."""

    start: int
    numel: int

    @property
    def end(self) -> int:
        """Return the place after the last element."""
        return self.start + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """The places of tensors of one dtype in flat memory.

    Attributes:
        spans: one for each tensor, in order; gaps between them are for alignment.
        numel: elements of the whole, padding included.
    """

    spans: tuple[Span, ...]
    numel: int

    def gaps(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of ``flat``, which has this layout, that belong to no tensor; the padding is one."""
        starts = [*(span.start for span in self.spans[1:]), self.numel]
        ends = [span.end for span in self.spans]
        return [flat[end:start] for end, start in zip(ends, starts, strict=True) if end < start]


def flat_layout(tensors: Sequence[torch.Tensor], multiple_of: int = 1, extra_numel: int = 0) -> FlatLayout:
    """Return where ``tensors``, all of one dtype, lie in flat memory.

    Args:
        tensors: at least one.
        multiple_of: the number of elements is a multiple of it, such as the group size where each rank owns a part.
        extra_numel: elements behind the last tensor, before the padding; they end where ``numel`` does if
            ``multiple_of`` is 1.
    """
    step = max(1, ALIGNMENT_BYTES // tensors[0].element_size())
    spans: list[Span] = []
    end = 0
    for tensor in tensors:
        start = -(-end // step) * step
        spans.append(Span(start, tensor.numel()))
        end = start + tensor.numel()
    end += extra_numel
    return FlatLayout(tuple(spans), -(-end // multiple_of) * multiple_of)


def flat_memory(
    numel: int, dtype: torch.dtype, device: torch.device, group: Group = None, shared: bool = True
) -> torch.Tensor:
    """Return a tensor of zeros: on the CPU from :func:`comm_collectives.empty_shared`, so that ranks reduce in place.

    Args:
        numel: elements of the one dimension.
        dtype, device: of the tensor.
        group: where it is to be used; this rank is a member.
        shared: False for memory of this process alone.
    """
    if shared and device.type == "cpu" and numel:
        flat = empty_shared(numel, dtype, group)
        if flat is not None:
            return flat.zero_()
    return factories.zeros(numel, dtype=dtype, device=device)


def view_of(flat: torch.Tensor, span: Span, like: torch.Tensor) -> torch.Tensor:
    """Return the view of ``flat`` at ``span`` with the shape of ``like``, and its strides where these are dense."""
    part = flat[span.start : span.end]
    return part.as_strided(like.shape, like.stride()) if is_dense(like) else part.view(like.shape)
