"""Experts and parts of sequences on several ranks against one rank, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import comm_orchestrator as dist
from comm_collectives import hooks
from comm_utils.errors import ArgumentError, ArgumentTypeError, CollectiveMismatchError
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]


def experts(k: int) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    E = 2 * W
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(E, 4, 4, dtype=torch.float64, generator=generator)
    everyones = [torch.randn(5 * one + 3, 4, dtype=torch.float64, generator=generator) for one in range(W)]
    gate = torch.randn(4, E, dtype=torch.float64, generator=generator)
    gate[:, 1] += 3  # experts get very different numbers of tokens
    tokens = everyones[rank].clone().requires_grad_()
    mine = weights[2 * rank : 2 * rank + 2].clone().requires_grad_()
    chosen, factors = hooks.top_k_routing(tokens @ gate, k)
    batch = hooks.dispatch_to_experts(tokens, chosen, E)
    assert sum(batch.counts) == batch.tokens.shape[0]
    outputs = [torch.tanh(one @ mine[place]) for place, one in enumerate(batch.per_expert())]
    result = batch.combine(torch.cat(outputs), factors)

    whole = [one.clone().requires_grad_() for one in everyones]
    all_weights = weights.clone().requires_grad_()
    expected = []
    for one in whole:
        top, index = (one @ gate).softmax(-1).topk(k, -1)
        top = top if k == 1 else top / top.sum(-1, keepdim=True)
        rows = torch.tanh(torch.einsum("nd,nkde->nke", one, all_weights[index]))
        expected.append((rows * top.unsqueeze(-1)).sum(1))
    torch.testing.assert_close(result, expected[rank], rtol=1e-12, atol=1e-13)
    (result * (rank + 1)).square().sum().backward()
    sum((one * (place + 1)).square().sum() for place, one in enumerate(expected)).backward()
    torch.testing.assert_close(tokens.grad, whole[rank].grad, rtol=1e-11, atol=1e-13)
    assert all_weights.grad is not None
    torch.testing.assert_close(mine.grad, all_weights.grad[2 * rank : 2 * rank + 2], rtol=1e-11, atol=1e-13)

    # One rank without tokens, and all tokens to one expert.
    few = torch.ones(0 if rank == 0 else 2, 4, dtype=torch.float64)
    batch = hooks.dispatch_to_experts(few, torch.full((len(few), 1), E - 1), E)
    assert batch.counts == [0, 2 * (W - 1) if rank == W - 1 else 0]
    returned = batch.combine(batch.tokens * 2, torch.ones(len(few), 1))
    assert torch.equal(returned, few * 2)
    with pytest.raises(ArgumentError, match=f"experts: got {E}; expected 0 to {E - 1}"):
        hooks.dispatch_to_experts(few.new_ones(1, 4), torch.full((1, 1), E), E)
    with pytest.raises(ArgumentError, match=r"experts: got shape \(1, 1\)"):
        hooks.dispatch_to_experts(few.new_ones(2, 4), torch.full((1, 1), 0), E)
    if W > 1:
        with pytest.raises(ArgumentError, match=f"num_experts: got {E + 1}; expected a multiple of {W}"):
            hooks.dispatch_to_experts(few.new_ones(1, 4), torch.full((1, 1), 0), E + 1)
    with pytest.raises(ArgumentError, match="combine: outputs: got"):
        batch.combine(torch.ones(len(batch.tokens) + 1, 4), torch.ones(len(few), 1))
    with pytest.raises(ArgumentError, match=f"top_k_routing: k: got {E + 1}"):
        hooks.top_k_routing(gate, E + 1)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_experts_compute_what_one_rank_does(pools: Pools, world_size: int, k: int) -> None:
    pools(world_size).run(experts, k)


def leaves_experts_out() -> None:
    """Send all tokens to the first rank's expert; the others run none, so that their outputs need no gradients."""
    rank, W = dist.get_rank(), dist.get_world_size()
    for trains_tokens, trains_factors, trains_zeros in (
        (True, True, False),
        (True, False, False),
        (False, True, False),
        (True, True, True),
    ):
        tokens = torch.arange(8.0).view(2, 4).requires_grad_(trains_tokens)
        factors = torch.full((2, 1), rank + 1.0, requires_grad=trains_factors)
        expert = torch.full((4,), 2.0, requires_grad=True)
        batch = hooks.dispatch_to_experts(tokens, torch.zeros(2, 1, dtype=torch.int64), W)
        outputs = torch.zeros_like(batch.tokens, requires_grad=trains_zeros)
        if len(batch.tokens):
            outputs = batch.tokens * expert
        batch.combine(outputs, factors).sum().backward()
        assert tokens.grad is None or torch.equal(tokens.grad, torch.full((2, 4), 2.0 * (rank + 1)))
        assert factors.grad is None or factors.grad.flatten().tolist() == [12, 44]
        assert rank or torch.equal(expert.grad, torch.tensor([4.0, 6, 8, 10]) * sum(range(W + 1)))
    with torch.no_grad():
        assert not batch.combine(outputs.detach(), factors).requires_grad


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_rank_without_tokens_may_leave_its_experts_out(pools: Pools, world_size: int) -> None:
    pools(world_size).run(leaves_experts_out)


def ring() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    held = [torch.full((3,), float(rank)), torch.full((1, 2), rank)]
    for step in range(W):
        assert held[0][0].item() == (rank - step) % W
        assert held[1].tolist() == [[(rank - step) % W] * 2]
        held = hooks.ring_exchange(held).wait()
    assert held[0][0].item() == rank
    generator = torch.Generator().manual_seed(2)
    whole = [torch.randn(2, 3, 4 * W, 6, dtype=torch.float64, generator=generator) for _ in range(4)]
    for is_causal in (False, True):
        for balanced in (False, True):
            for scale in (None, 0.3):
                leaves = [one.clone().requires_grad_() for one in whole[:3]]
                expected = F.scaled_dot_product_attention(*leaves, is_causal=is_causal, scale=scale)
                (expected * whole[3]).sum().backward()
                parts = [
                    hooks.split_context(one, None, 2, balanced=balanced).clone().requires_grad_() for one in whole[:3]
                ]
                result = hooks.ring_attention(*parts, is_causal=is_causal, balanced=balanced, scale=scale)
                (result * hooks.split_context(whole[3], None, 2, balanced=balanced)).sum().backward()
                joined = hooks.join_context(result, None, 2, balanced=balanced)
                torch.testing.assert_close(joined, expected.detach(), rtol=1e-12, atol=1e-13)
                for part, leaf in zip(parts, leaves, strict=True):
                    assert part.grad is not None
                    gradient = hooks.join_context(part.grad, None, 2, balanced=balanced)
                    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-11, atol=1e-13)
    halves = [hooks.split_context(one, None, 2).to(torch.bfloat16).requires_grad_() for one in whole[:3]]
    result = hooks.ring_attention(*halves, is_causal=True)
    assert result.dtype == torch.bfloat16
    result.sum().backward()
    wide = [one.to(torch.bfloat16).double() for one in whole[:3]]
    expected = hooks.split_context(F.scaled_dot_product_attention(*wide, is_causal=True), None, 2)
    torch.testing.assert_close(result.double(), expected, rtol=1e-2, atol=1e-2)
    # Large scores, which bfloat16 rounds by as much as there is between them.
    sharp = [(8 * hooks.split_context(one, None, 2)).to(torch.bfloat16) for one in whole[:3]]
    grads = []
    for is_mixed in (False, True):
        leaves = [one.clone().requires_grad_() for one in sharp]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            result = hooks.ring_attention(*leaves, is_causal=True)
        result.float().square().sum().backward()
        grads.append([result, *(one.grad for one in leaves)])
    for plain, mixed in zip(*grads, strict=True):
        assert torch.equal(plain, mixed)
    with pytest.raises(ArgumentError, match=r"ring_attention: key: got torch.float64 of shape"):
        hooks.ring_attention(whole[0], whole[1][:, :, :2], whole[2])
    with pytest.raises(ArgumentTypeError, match="ring_attention: query: got 3"):
        hooks.ring_attention(3, whole[1], whole[2])  # type: ignore[arg-type]
    for part, dim, found in ((torch.ones(5), 0, "tensor: got a part of 5"), (torch.ones(4), 1, "dim: got 1")):
        with pytest.raises(ArgumentError, match=f"join_context: {found}"):
            hooks.join_context(part, None, dim, balanced=True)
    with pytest.raises(ArgumentError, match=f"split_context: tensor: got shape .* expected a multiple of {2 * W}"):
        hooks.split_context(torch.ones(2 * W + 1), None, 0, balanced=True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ring_attention_is_attention_to_the_whole_sequence(pools: Pools, world_size: int) -> None:
    pools(world_size).run(ring)


def uneven_parts() -> None:
    rank = dist.get_rank()
    parts = [torch.ones(1, 2, 3 if rank else 4, 4, requires_grad=True) for _ in range(3)]
    found = r"different parts \(rank 0: torch.float32 of shape \(1, 2, 4, 4\).*; rank 1: .* of shape \(1, 2, 3, 4\)"
    with pytest.raises(CollectiveMismatchError, match=f"ring_attention: part: got {found}"):
        hooks.ring_attention(*parts)
    with pytest.raises(CollectiveMismatchError, match=f"join_context: part: got {found}"):
        hooks.join_context(parts[0], dim=2)
    with pytest.raises(CollectiveMismatchError, match=r"rank 0: .* is_causal=False.*; rank 1: .* is_causal=True"):
        hooks.ring_attention(*(one[:, :, :2] for one in parts), is_causal=bool(rank))
    with pytest.raises(ArgumentError, match=r"rank 1 refused its arguments: .*balanced needs|^ring_attention: query"):
        hooks.ring_attention(*parts, balanced=True)
    with pytest.raises(ArgumentError, match=r"rank 1 refused its arguments: .*balanced needs|^join_context: tensor"):
        hooks.join_context(parts[0], dim=2, balanced=True)
    total = torch.ones(1)
    dist.all_reduce(total)  # nothing was sent: the group works
    assert total == 2


def test_ranks_with_uneven_parts_of_the_sequence_are_refused(pools: Pools) -> None:
    pools(2).run(uneven_parts)
