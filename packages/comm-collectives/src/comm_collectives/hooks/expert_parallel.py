"""Expert parallelism: tokens travel to the ranks of their experts and back.

Lepikhin et al., "GShard", 2020 (top-2), and Fedus et al., "Switch Transformers", 2021 (top-1), without their
capacity: no token is dropped, so ranks exchange how many tokens go where, and then the tokens, in uneven parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from comm_collectives.all_to_all import all_to_all_single
from comm_collectives.annotations import Group
from comm_collectives.collective import collective
from comm_collectives.groups import get_world_size
from comm_collectives.hooks.apply import apply
from comm_collectives.hooks.group_arguments import group_along
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown
from comm_utils.torch_support import factories

__all__ = ["ExpertBatch", "dispatch_to_experts", "expert_all_to_all", "top_k_routing"]


@collective(labels=False)
def expert_all_to_all(
    tokens: torch.Tensor, input_split_sizes: Sequence[int], output_split_sizes: Sequence[int], group: Group = None
) -> torch.Tensor:
    """Send part r of ``tokens`` to rank r and return what all ranks sent to this one; gradients travel back.

    Args:
        tokens: (sum of ``input_split_sizes``, ...); only read.
        input_split_sizes: W numbers of rows to send to each rank.
        output_split_sizes: W numbers of rows to receive from each rank.
        group: the expert-parallel group; None is the world group.
    """
    result: torch.Tensor = apply(_AllToAll, tokens, list(input_split_sizes), list(output_split_sizes), group)
    return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, sent: list[int], received: list[int], group: Group) -> torch.Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        source = tokens.detach().contiguous()
        output = source.new_empty((sum(received), *source.shape[1:]))
        all_to_all_single(output, source, received, sent, group)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return apply(_AllToAll, gradient, ctx.received, ctx.sent, ctx.group), None, None, None


class _Reaching(torch.autograd.Function):
    """The first tensor; its backward goes on to the others, whose gradients from here are zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = [(one.shape, one.dtype, one.device) for one in others]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, *(factories.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)


def top_k_routing(logits: torch.Tensor, k: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token and their weights.

    Args:
        logits: (tokens, experts), float.
        k: 1 for the probability of the likeliest expert as its weight (Switch Transformer); 2 or more for the
            probabilities of the k likeliest, divided by their sum (GShard).

    Returns:
        Experts, (tokens, k) int64, and weights, (tokens, k), through which gradients flow to ``logits``.

    Raises:
        ArgumentError: there are fewer than ``k`` experts.
    """
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2:
        raise ArgumentTypeError(f"top_k_routing: logits: got {shown(logits)}; expected a tensor (tokens, experts)")
    if not isinstance(k, int) or not 1 <= k <= logits.shape[1]:
        raise ArgumentError(f"top_k_routing: k: got {shown(k)}; expected 1 to {logits.shape[1]}, the number of experts")
    weights, experts = logits.softmax(-1).topk(k, -1)
    return experts, weights if k == 1 else weights / weights.sum(-1, keepdim=True)


@dataclass(frozen=True)
class ExpertBatch:
    """The tokens that came to this rank's experts; made by :func:`dispatch_to_experts`.

    Attributes:
        tokens: (rows, ...), those of the first local expert, then those of the next.
        counts: number of rows of each local expert.
    """

    tokens: torch.Tensor
    counts: list[int]
    _order: torch.Tensor
    _arrived: torch.Tensor
    _sent: list[int]
    _received: list[int]
    _shape: torch.Size
    _group: Group

    def per_expert(self) -> list[torch.Tensor]:
        """Return the tokens of each local expert."""
        return list(torch.split(self.tokens, self.counts))

    def combine(self, outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return for each token the weighted sum of its experts' outputs, in the order in which tokens were dispatched.

        Called by all ranks of the group.

        Args:
            outputs: (rows, ...), one for each row of ``tokens``, in their order; only read. A rank without rows gives
                its experts' outputs for none, or 0 rows of the dtype and the further dimensions that outputs have on
                the other ranks.
            weights: (tokens, k), of the experts that were given for dispatch.

        Raises:
            ArgumentError: ``outputs`` has another number of rows, or ``weights`` another shape.
        """
        if outputs.shape[0] != self.tokens.shape[0]:
            raise ArgumentError(
                f"combine: outputs: got {outputs.shape[0]} rows; expected {self.tokens.shape[0]}, one for each of "
                "tokens"
            )
        if weights.shape != self._shape:
            raise ArgumentError(
                f"combine: weights: got shape {tuple(weights.shape)}; expected {tuple(self._shape)}, that of experts"
            )
        needing = [one for one in (self.tokens, weights) if one.requires_grad]
        if needing and not (outputs.requires_grad and len(outputs)):
            # Where this rank got no tokens and left its experts out, the others wait for it in both exchanges of the
            # backward all the same.
            outputs = apply(_Reaching, outputs, *needing)
        by_source = torch.empty_like(outputs).index_copy(0, self._arrived, outputs)
        returned: torch.Tensor = expert_all_to_all(by_source, self._received, self._sent, self._group)
        by_token = torch.empty_like(returned).index_copy(0, self._order, returned)
        by_token = by_token.view(*self._shape, *outputs.shape[1:])
        return (by_token * weights.view(*self._shape, *[1] * (outputs.dim() - 1)).to(by_token.dtype)).sum(1)


def dispatch_to_experts(
    tokens: torch.Tensor, experts: torch.Tensor, num_experts: int, group: Any = None
) -> ExpertBatch:
    """Send each token to the ranks of its experts; return those that came to this rank's experts.

    Rank r of the group has the experts r * num_experts / W to (r + 1) * num_experts / W. Called by all ranks of the
    group.

    Args:
        tokens: (n, ...), n may differ between ranks and be 0; only read. Gradients come back to it.
        experts: (n, k), int64, the experts of each token, 0 to ``num_experts`` - 1.
        num_experts: of all ranks together; a multiple of the group's size.
        group: the expert-parallel group, ``ParallelGroups`` or a ``DeviceMesh``; None is the world group.

    Raises:
        ArgumentError: shapes do not fit, an expert does not exist, or the group's size does not divide ``num_experts``.
    """
    call = "dispatch_to_experts"
    group = group_along(call, "group", group, "expert")
    W = get_world_size(group)
    _check(call, tokens, experts, num_experts, W)
    local, k = num_experts // W, experts.shape[1]
    chosen = experts.reshape(-1)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=num_experts)
    incoming = torch.empty_like(counts)
    all_to_all_single(incoming, counts, None, None, group)
    by_rank = torch.stack([counts, incoming]).view(2, W, local)
    # One transfer to the host, where accelerators have the counts.
    flat = by_rank.flatten().tolist()
    sent = [sum(flat[rank * local : (rank + 1) * local]) for rank in range(W)]
    received = [sum(flat[(W + rank) * local : (W + rank + 1) * local]) for rank in range(W)]
    rows: torch.Tensor = expert_all_to_all(tokens[order // k], sent, received, group)
    # Rows come by source and expert; experts want them by expert.
    owners = factories.arange(local, device=tokens.device).repeat(W).repeat_interleave(incoming)
    arrived = owners.argsort(stable=True)
    mine = [sum(flat[(W + rank) * local + one] for rank in range(W)) for one in range(local)]
    return ExpertBatch(rows[arrived], mine, order, arrived, sent, received, experts.shape, group)


def _check(call: str, tokens: Any, experts: Any, num_experts: Any, W: int) -> None:
    if not isinstance(tokens, torch.Tensor) or not tokens.dim():
        raise ArgumentTypeError(f"{call}: tokens: got {shown(tokens)}; expected a tensor (n, ...)")
    if not isinstance(experts, torch.Tensor) or experts.dtype != torch.int64:
        raise ArgumentTypeError(f"{call}: experts: got {shown(experts)}; expected an int64 tensor (n, k)")
    if experts.dim() != 2 or experts.shape[0] != tokens.shape[0]:
        raise ArgumentError(
            f"{call}: experts: got shape {tuple(experts.shape)}; expected ({tokens.shape[0]}, k), with the experts "
            "of each token"
        )
    if not isinstance(num_experts, int) or num_experts < 1 or num_experts % W:
        raise ArgumentError(
            f"{call}: num_experts: got {shown(num_experts)}; expected a multiple of {W}, the size of the group"
        )
    if experts.numel() and experts.device.type == "cpu":
        for one in (int(experts.min()), int(experts.max())):
            if not 0 <= one < num_experts:
                raise ArgumentError(f"{call}: experts: got {one}; expected 0 to {num_experts - 1}")
