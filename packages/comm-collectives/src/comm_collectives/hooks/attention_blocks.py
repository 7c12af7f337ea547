"""Attention to one block of keys and values, and how results of several blocks become one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from comm_utils.torch_support import factories

__all__ = ["add_block_gradients", "attend", "merge"]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, masked: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention to one block, and the logarithm of its denominators.

    Args:
        query: (batch, heads, q, d).
        key: (batch, heads, k, d).
        value: (batch, heads, k, d of values).
        scale: of the products.
        masked: of the diagonal block of causal attention, where q equals k.

    Returns:
        (batch, heads, q, d of values) and (batch, heads, q, 1), in float32 or float64.
    """
    with _without_autocast(query):
        scores = _scores(query, key, scale, masked)
        logsumexp = scores.logsumexp(-1, keepdim=True)
        return torch.exp(scores - logsumexp) @ value.to(scores.dtype), logsumexp


def merge(
    one: tuple[torch.Tensor, torch.Tensor] | None, other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention to the blocks of both results of :func:`attend`.

    Args:
        one: the result so far; None before the first block.
        other: that of one more block.
    """
    if one is None:
        return other
    logsumexp = torch.logaddexp(one[1], other[1])
    return one[0] * torch.exp(one[1] - logsumexp) + other[0] * torch.exp(other[1] - logsumexp), logsumexp


def add_block_gradients(
    parts: Sequence[torch.Tensor],
    key: torch.Tensor,
    value: torch.Tensor,
    sums: Sequence[torch.Tensor],
    scale: float,
    masked: bool,
) -> None:
    """Add the gradients that one block of keys and values gives.

    Dao et al., "FlashAttention", 2022, appendix B.2.

    Args:
        parts: query, gradient of the result, logarithm of the denominators, and row sums of gradient times result.
        key: of the block.
        value: of the block.
        sums: gradients of query, key and value; overwritten with the sums.
        scale: of the products.
        masked: as for :func:`attend`.
    """
    query, gradient, logsumexp, delta = parts
    for_query, for_key, for_value = sums
    with _without_autocast(query):
        probabilities = torch.exp(_scores(query, key, scale, masked) - logsumexp)
        gradient = gradient.to(probabilities.dtype)
        for_value += probabilities.transpose(-1, -2) @ gradient
        products = probabilities * (gradient @ value.to(probabilities.dtype).transpose(-1, -2) - delta) * scale
        for_query += products @ key.to(products.dtype)
        for_key += products.transpose(-1, -2) @ query.to(products.dtype)


def _without_autocast(tensor: torch.Tensor) -> torch.autocast:
    """Return what lets products of matrices keep the precision of their operands."""
    return torch.autocast(tensor.device.type, enabled=False)


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, masked: bool) -> torch.Tensor:
    computed = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query.to(computed) @ key.to(computed).transpose(-1, -2)) * scale
    if masked:
        later = factories.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores
