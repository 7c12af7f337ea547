"""Context parallelism: each rank holds a part of the sequence, and keys and values travel around a ring.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023. In each step a rank computes
with the block that it has while it sends this block to the next rank and receives another from the previous one.
Results of blocks are joined by online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from comm_collectives.annotations import Group
from comm_collectives.collective import collective
from comm_collectives.compression.defaults import no_default
from comm_collectives.groups import get_rank, get_world_size
from comm_collectives.hooks.apply import apply
from comm_collectives.hooks.attention_blocks import add_block_gradients, attend, merge
from comm_collectives.hooks.call_agreement import agree_on_call, fingerprint_of
from comm_collectives.hooks.model_agreement import as_refusal
from comm_collectives.hooks.tensor_parallel.along import checked_dim, gathered
from comm_collectives.point_to_point import P2POp, batch_isend_irecv, irecv, isend
from comm_utils.backend import Work
from comm_utils.errors import ArgumentError, ArgumentTypeError, CommError
from comm_utils.given import shown
from comm_utils.torch_support import factories

__all__ = ["RingExchange", "join_context", "ring_attention", "ring_exchange", "split_context"]


class RingExchange:
    """Tensors on their way to the next rank; made by :func:`ring_exchange`."""

    def __init__(self, works: list[Work], sent: list[torch.Tensor], received: list[torch.Tensor]) -> None:
        self._works, self._sent, self._received = works, sent, received

    def wait(self) -> list[torch.Tensor]:
        """Return what the previous rank sent; what was sent may be overwritten from now on."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], []
        return self._received


def ring_exchange(tensors: list[torch.Tensor], group: Group = None) -> RingExchange:
    """Start to send ``tensors`` to the next rank of the group and to receive those of the previous one.

    Args:
        tensors: any shapes and dtypes, the same on every rank; must stay as they are until ``wait()`` returns.
        group: the context-parallel group; None is the world group.
    """
    W, rank = get_world_size(group), get_rank(group)
    sent = [one.detach().contiguous() for one in tensors]
    if W == 1:
        return RingExchange([], sent, [one.clone() for one in sent])
    received = [torch.empty_like(one) for one in sent]
    ops = [P2POp(isend, one, group=group, group_peer=(rank + 1) % W) for one in sent]
    ops += [P2POp(irecv, one, group=group, group_peer=(rank - 1) % W) for one in received]
    return RingExchange(batch_isend_irecv(ops), sent, received)


def _chunks_of(rank: int, W: int, balanced: bool) -> list[int]:
    """Return the numbers of the parts of the sequence that ``rank`` holds, in order."""
    return [rank, 2 * W - 1 - rank] if balanced else [rank]


def split_context(tensor: torch.Tensor, group: Group = None, dim: int = 1, *, balanced: bool = False) -> torch.Tensor:
    """Return this rank's part of a sequence that every rank has.

    Args:
        tensor: the same on every rank; only read. Positions and masks are split in the same way.
        group: the context-parallel group; None is the world group.
        dim: the dimension of the sequence; its size is a multiple of W, or of 2 W if ``balanced``.
        balanced: parts r and 2 W - 1 - r of 2 W for rank r, which gives every rank as much causal attention to compute.

    Raises:
        ArgumentError: the sequence cannot be divided.
    """
    call = "split_context"
    W, rank = get_world_size(group), get_rank(group)
    parts = 2 * W if balanced else W
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"{call}: tensor: got {shown(tensor)}; expected a tensor")
    if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] % parts:
        raise ArgumentError(
            f"{call}: tensor: got shape {tuple(tensor.shape)}; expected a multiple of {parts} along dimension {dim}"
        )
    pieces = tensor.chunk(parts, dim)
    return torch.cat([pieces[one] for one in _chunks_of(rank, W, balanced)], dim)


def join_context(tensor: torch.Tensor, group: Group = None, dim: int = 1, *, balanced: bool = False) -> torch.Tensor:
    """Return the whole sequence on every rank: the inverse of :func:`split_context`, without a gradient.

    Ranks compare their parts first, with one all_gather of 8 bytes.

    Args:
        tensor: this rank's part, the same shape on every rank; only read.
        group: the context-parallel group; None is the world group.
        dim: the dimension of the sequence.
        balanced: as for :func:`split_context`; the part's size along ``dim`` is even.

    Raises:
        ArgumentError: there is no such dimension, or a balanced part that cannot be halved; other ranks raise as well
            and name the rank.
        ArgumentTypeError: ``tensor`` is none.
        CollectiveMismatchError: parts differ between ranks; names the ranks.
    """
    call = "join_context"

    def described() -> str:
        place = checked_dim(call, tensor, dim)
        if balanced and tensor.shape[place] % 2:
            raise ArgumentError(
                f"{call}: tensor: got a part of {tensor.shape[place]} along dimension {place}; balanced needs an even "
                "number"
            )
        return f"{tensor.dtype} of shape {tuple(tensor.shape)}, dim={place}, balanced={bool(balanced)}"

    _agree_on_parts(call, described, tensor, group)
    dim, W = dim % tensor.dim(), get_world_size(group)
    held = [one for rank in range(W) for one in _chunks_of(rank, W, balanced)]
    pieces = gathered(tensor.detach(), dim, group, no_default(group)).chunk(len(held), dim)
    return torch.cat([pieces[held.index(number)] for number in range(len(held))], dim)


def _agree_on_parts(call: str, described: Callable[[], str], part: object, group: Group) -> None:
    """Check this rank's arguments, and that all ranks have parts alike; nothing else is sent where one has not.

    Args:
        call: the user's call, for messages.
        described: returns what has to be the same on all ranks, or raises.
        part: tells the device.
        group: whose ranks take part.
    """
    error: CommError | None = None
    text = ""
    try:
        text = described()
    except Exception as raised:
        error = as_refusal(call, raised)
    if get_world_size(group) > 1:
        device = part.device if isinstance(part, torch.Tensor) else torch.device("cpu")
        agree_on_call(call, "part", fingerprint_of(text), text, error, group, device)
    elif error is not None:
        raise error


@collective(labels=False)
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: Group = None,
    *,
    is_causal: bool = False,
    balanced: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Return ``scaled_dot_product_attention`` over the whole sequence, of which each rank has a part.

    Ranks compare their parts first, with one all_gather of 8 bytes.

    Args:
        query: (batch, heads, S / W, d), float, the same shape on every rank; only read.
        key: (batch, heads, S / W, d); only read.
        value: (batch, heads, S / W, d of values); only read.
        group: the context-parallel group; None is the world group.
        is_causal: a position attends to those before it and itself, by their places in the whole sequence.
        balanced: the sequence was divided by :func:`split_context` with ``balanced=True``.
        scale: of the products; None for 1 / sqrt(d).

    Returns:
        This rank's part of the result: (batch, heads, S / W, d of values), in the dtype of ``query``.

    Raises:
        ArgumentError: shapes do not fit; other ranks raise as well and name the rank.
        CollectiveMismatchError: parts or arguments differ between ranks; names the ranks.
    """
    call = "ring_attention"

    def described() -> str:
        _check_parts(call, query, key, value, balanced)
        return (
            f"{query.dtype} of shape {tuple(query.shape)} with values of {value.shape[3]}, "
            f"is_causal={bool(is_causal)}, balanced={bool(balanced)}, scale={scale}"
        )

    _agree_on_parts(call, described, query, group)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    result: torch.Tensor = apply(_RingAttention, query, key, value, group, is_causal, balanced, scale)
    return result


def _check_parts(call: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, balanced: bool) -> None:
    for name, one in (("query", query), ("key", key), ("value", value)):
        if not isinstance(one, torch.Tensor) or one.dim() != 4 or not one.is_floating_point():
            raise ArgumentTypeError(
                f"{call}: {name}: got {shown(one)}; expected a float tensor of shape (batch, heads, sequence, d)"
            )
    for name, one, expected in (("key", key, query.shape), ("value", value, (*key.shape[:3], value.shape[3]))):
        if one.shape != expected or one.dtype != query.dtype:
            raise ArgumentError(
                f"{call}: {name}: got {one.dtype} of shape {tuple(one.shape)}; expected {query.dtype} of shape "
                f"{tuple(expected)}, which query has"
            )
    if balanced and query.shape[2] % 2:
        raise ArgumentError(f"{call}: query: got a part of {query.shape[2]} positions; balanced needs an even number")


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: Group,
        is_causal: bool,
        balanced: bool,
        scale: float,
    ) -> torch.Tensor:
        W, rank = get_world_size(group), get_rank(group)
        own = _chunks_of(rank, W, balanced)
        queries = query.detach().chunk(len(own), 2)
        # For each part of the query: the result so far and the logarithm of its denominator.
        state: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(own)
        block = [key.detach(), value.detach()]
        for step in range(W):
            # The next block travels while this one is computed with.
            travelling = ring_exchange(block, group) if step < W - 1 else None
            held = _chunks_of((rank - step) % W, W, balanced)
            keys, values = (one.chunk(len(held), 2) for one in block)
            for place, mine in enumerate(own):
                for other, theirs in enumerate(held):
                    if not is_causal or theirs <= mine:
                        found = attend(queries[place], keys[other], values[other], scale, is_causal and theirs == mine)
                        state[place] = merge(state[place], found)
            if travelling is not None:
                block = travelling.wait()
        output = torch.cat([one[0] for one in state if one is not None], 2).to(query.dtype)
        logsumexp = torch.cat([one[1] for one in state if one is not None], 2)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.group, ctx.is_causal, ctx.balanced, ctx.scale = group, is_causal, balanced, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, output, logsumexp = ctx.saved_tensors
        group, is_causal, balanced, scale = ctx.group, ctx.is_causal, ctx.balanced, ctx.scale
        W, rank = get_world_size(group), get_rank(group)
        own = _chunks_of(rank, W, balanced)
        computed = logsumexp.dtype
        delta = (gradient.to(computed) * output.to(computed)).sum(-1, keepdim=True)
        parts = [one.chunk(len(own), 2) for one in (query, gradient, logsumexp, delta)]
        for_query = factories.zeros(query.shape, dtype=computed, device=query.device)
        query_parts = for_query.chunk(len(own), 2)
        block = [key, value]
        arriving: RingExchange | None = None
        for step in range(W):
            travelling = ring_exchange(block, group) if step < W - 1 else None
            held = _chunks_of((rank - step) % W, W, balanced)
            keys, values = (one.chunk(len(held), 2) for one in block)
            grads = [factories.zeros(one.shape, dtype=computed, device=one.device) for one in block]
            for_keys, for_values = (one.chunk(len(held), 2) for one in grads)
            for place, mine in enumerate(own):
                for other, theirs in enumerate(held):
                    if not is_causal or theirs <= mine:
                        add_block_gradients(
                            [one[place] for one in parts],
                            keys[other],
                            values[other],
                            [query_parts[place], for_keys[other], for_values[other]],
                            scale,
                            is_causal and theirs == mine,
                        )
            # Gradients of a block follow it around the ring, and come home behind the last step.
            if arriving is not None:
                for mine_too, theirs_too in zip(grads, arriving.wait(), strict=True):
                    mine_too += theirs_too
            if W > 1:
                arriving = ring_exchange(grads, group)
            if travelling is not None:
                block = travelling.wait()
        if arriving is not None:
            grads = arriving.wait()
        for_key, for_value = grads
        return for_query.to(query.dtype), for_key.to(key.dtype), for_value.to(value.dtype), None, None, None, None
