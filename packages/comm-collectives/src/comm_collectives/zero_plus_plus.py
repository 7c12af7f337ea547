"""The quantised collectives of ZeRO++, on any device and backend.

Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", ICLR 2024: gradients are
reduced in int4, first within a host and then between hosts (qgZ), and weights are gathered in int8 (qwZ). Sums are made
in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_collectives.arguments import check_tensor, describe, enter, is_member
from comm_collectives.coalesced import reduce_scatter_coalesced
from comm_collectives.compression import Compression
from comm_collectives.compression.selection import DTYPES
from comm_collectives.memory import contiguous_elements
from comm_collectives.reduce_scatter import reduce_scatter_tensor
from comm_utils.backend import Backend
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.torch_support import factories

__all__ = ["all_to_all_quant_reduce", "dequantize_weights", "quantize_weights"]

_CALL = "all_to_all_quant_reduce"
#: int4 in blocks of 256 elements.
_GRADIENTS = Compression("int4")
_LEVELS = 127
# Elements of a group of weights: enough to hide its scale of 32 bits, few enough for values of similar magnitude.
_MOST_IN_GROUP, _LEAST_IN_GROUP = 2048, 32


def all_to_all_quant_reduce(
    tensors: Sequence[torch.Tensor], groups: Mapping[str, ProcessGroup | Any]
) -> list[torch.Tensor]:
    """Average many tensors over all ranks in int4, and return this rank's part of each.

    With N hosts of L ranks, each rank of a host first reduces the parts that the ranks of its number on all hosts need,
    within the host; then these ranks reduce them between the hosts. An element loses at most 1/14 of the largest
    magnitude of its block in each encoding, of which there are L - 1 and N - 1, each divided by the ranks of its stage.

    Args:
        tensors: float32, float16 or bfloat16, the same list on every rank; only read. Those of one dimension are
            averaged exactly, as in DeepSpeed. A tensor of n elements is cut into parts of ceil(n / W); the last ones
            may be shorter or empty.
        groups: ``local_H`` of the ranks H*L to (H+1)*L - 1 of host H, and ``global_P`` of the ranks P, P+L, P+2L …,
            with ``GroupMember.NON_GROUP_MEMBER`` for groups of others; as DeepSpeed makes them. Without ``global_``
            groups, all ranks are those of one host.

    Returns:
        One-dimensional tensors of the dtypes of ``tensors``, in their order.

    Raises:
        ArgumentError, ArgumentTypeError: before anything is sent.
    """
    backend = enter(_CALL, None)
    assert backend is not None  # every rank is in the world
    local, between = _stages(backend, groups)
    if not isinstance(tensors, (list, tuple)):
        raise ArgumentTypeError(f"{_CALL}: tensors: got {describe(tensors)}; expected a list of tensors")
    for position, tensor in enumerate(tensors):
        check_tensor(_CALL, f"tensors[{position}]", tensor, backend, None)
        if tensor.dtype not in DTYPES:
            raise ArgumentError(
                f"{_CALL}: tensors[{position}]: got {tensor.dtype}; expected float32, float16 or bfloat16"
            )
    with torch.no_grad():
        return [
            reduce_scatter_coalesced([tensor])[0] if tensor.dim() < 2 else _reduced(backend, tensor, local, between)
            for tensor in tensors
        ]


def _stages(backend: Backend, groups: Any) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Return this rank's group within its host and the one between hosts; None for a stage of one rank."""
    if not isinstance(groups, Mapping):
        raise ArgumentTypeError(f"{_CALL}: groups: got {describe(groups)}; expected a dict of groups by name")
    W, rank = backend.get_world_size(None), backend.get_rank(None)
    found: dict[str, tuple[ProcessGroup, list[int]]] = {}
    for name, group in groups.items():
        kind = str(name).partition("_")[0]
        if kind not in ("local", "global"):
            raise ArgumentError(f"{_CALL}: groups: got the name {name!r}; expected local_0, local_1 … and global_0 …")
        if group is not None and is_member(_CALL, group, f"groups[{name!r}]"):
            ranks = list(backend.get_process_group_ranks(group))
            if rank in ranks:
                found[kind] = group, ranks
    if "local" not in found:
        raise ArgumentError(f"{_CALL}: groups: got {sorted(groups)}, of which rank {rank} is in no local_ group")
    local = found["local"][1]
    L = len(local)
    between = found["global"][1] if "global" in found else [rank]
    first = rank - rank % L
    if W % L or local != list(range(first, first + L)) or between != list(range(rank % L, W, L)):
        raise ArgumentError(
            f"{_CALL}: groups: rank {rank} of {W} is in a local group of the ranks {local} and a global one of "
            f"{between}; expected consecutive ranks from a multiple of their number, and every {L}th rank"
        )
    return found["local"][0] if L > 1 else None, found["global"][0] if len(between) > 1 else None


def _reduced(
    backend: Backend, tensor: torch.Tensor, local: ProcessGroup | None, between: ProcessGroup | None
) -> torch.Tensor:
    W, rank, count = backend.get_world_size(None), backend.get_rank(None), tensor.numel()
    L = 1 if local is None else backend.get_world_size(local)
    part = math.ceil(count / W)
    # What is between two stages is not rounded to 16 bits.
    dtype = torch.float32 if local is not None and between is not None else tensor.dtype
    parts = factories.zeros(W * part, dtype=dtype, device=tensor.device)
    parts[:count].copy_(contiguous_elements(tensor))
    if local is not None:
        # Of the parts of all hosts, those of one number together.
        by_number = parts.view(W // L, L, part).transpose(0, 1).contiguous()
        parts = parts.new_empty(W // L * part)
        reduce_scatter_tensor(parts, by_number.view(-1), "avg", local, compression=_GRADIENTS)
    if between is not None:
        source, parts = parts, parts.new_empty(part)
        reduce_scatter_tensor(parts, source, "avg", between, compression=_GRADIENTS)
    return parts[: max(0, min(part, count - rank * part))].to(tensor.dtype)


def quantize_weights(weights: torch.Tensor, groups: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``weights`` as int8 of the same shape, and the float32 scales of their groups, (groups, 1).

    An element loses at most 1/254 of the largest magnitude of its group. Where that is not finite, the group becomes
    NaN.

    Args:
        weights: any float dtype and shape, n elements; only read.
        groups: a divisor of n; by default the least for groups of at most 2048 elements, or 1 where these would have
            fewer than 32.

    Raises:
        ArgumentError: ``groups`` is no divisor.
    """
    count = weights.numel()
    if groups is None:
        groups = _groups_for(count)
    elif groups < 1 or count % groups:
        raise ArgumentError(f"quantize_weights: groups: got {groups}; expected a divisor of {count}, the elements")
    rows = contiguous_elements(weights).float().view(groups, -1)
    largest = rows.abs().amax(dim=1, keepdim=True) if count else rows.new_zeros(groups, 1)
    scales = largest / _LEVELS
    inverses = torch.where(largest > 0, _LEVELS / largest, 0.0)
    integers = (rows * inverses).nan_to_num_(0.0).round_().clamp_(-_LEVELS, _LEVELS).to(torch.int8)
    return integers.view(weights.shape), scales.masked_fill_(~largest.isfinite(), torch.nan)


def dequantize_weights(quantized: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the weights of :func:`quantize_weights`, float32 or ``dtype``, in the shape of ``quantized``.

    Args:
        quantized: int8, n elements; of several ranks one after the other, without some of the last ones if need be.
        scales: float32, of all groups, which have ceil(n / groups) elements.
    """
    count, groups = quantized.numel(), scales.numel()
    size = math.ceil(count / groups) if groups else 0
    rows = factories.zeros(groups * size, dtype=torch.float32, device=quantized.device)
    rows[:count].copy_(quantized.reshape(-1))
    weights = (rows.view(groups, size) * scales.view(groups, 1)).view(-1)[:count].view(quantized.shape)
    return weights if dtype is None else weights.to(dtype)


@functools.lru_cache(maxsize=4096)
def _groups_for(count: int) -> int:
    least = max(1, math.ceil(count / _MOST_IN_GROUP))
    most = max(1, count // _LEAST_IN_GROUP)
    return next((groups for groups in range(least, most + 1) if count % groups == 0), 1)
