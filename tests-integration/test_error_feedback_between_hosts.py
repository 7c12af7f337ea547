"""What encodings between hosts lose is added to what travels next, wherever the shares of ranks lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_collectives.compression.between_hosts import EncodedBetween
from comm_collectives.hierarchy import plan as plans
from comm_collectives.hierarchy.layout import set_hosts
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]

HOST_BY_HOST, ROUND_ROBIN, UNEVEN = (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1)


def on(backend: str, host_of: tuple[int, ...], piece_bytes: int, body: Callable[..., Any], *args: Any) -> Any:
    """Call ``body`` on every rank of a world whose ranks are said to be on these hosts."""
    dist.init_distributed(backend, verbose=False, timeout=60)
    set_hosts(host_of)
    usual, EncodedBetween.piece_bytes = EncodedBetween.piece_bytes, piece_bytes
    try:
        return body(*args)
    finally:
        EncodedBetween.piece_bytes = usual
        dist.destroy_process_group()


def own_part(step: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what this rank has in a step; powers of two apart, so that one scale suits none of them."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return (torch.randn(count, generator=generator) * 2.0 ** (torch.arange(count) % 5)).to(dtype)


def all_reduced(tensor: torch.Tensor, op: str, compression: Any, async_op: bool = False) -> torch.Tensor:
    result = tensor.clone()
    work = dist.all_reduce(result, op, async_op=async_op, compression=compression)
    if work is not None:
        work.wait()
    return result


def all_reduced_later(tensor: torch.Tensor, op: str, compression: Any) -> torch.Tensor:
    return all_reduced(tensor, op, compression, async_op=True)


def scattered(tensor: torch.Tensor, op: str, compression: Any) -> torch.Tensor:
    result = torch.empty(tensor.numel() // dist.get_world_size(), dtype=tensor.dtype)
    dist.reduce_scatter_tensor(result, tensor, op, compression=compression)
    return result


def lacking(compression: dist.Compression, like: torch.Tensor) -> torch.Tensor:
    """Return what the results of all calls so far lack, of which ``like`` is this rank's."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, compression.state_dict())
    whole: torch.Tensor = dist.Compression.reshard(states, 1)[0]["tensors"]["a"]["local"]
    return whole if whole.numel() == like.numel() else whole.view(len(states), -1)[dist.get_rank()]


def nothing_is_lost(method: str, dtype: torch.dtype) -> None:
    for call, count in ((all_reduced, 4001), (all_reduced_later, 4001), (scattered, 4004)):
        for op in ("sum", "avg"):
            nothing_is_lost_by(call, method, op, count, dtype)


def nothing_is_lost_by(call: Callable[..., torch.Tensor], method: str, op: str, count: int, dtype: torch.dtype) -> None:
    compression = dist.Compression(method, error_feedback=True, between_hosts=True)
    named, result, exact = compression.of("a"), torch.zeros(()), torch.zeros(())
    for step in range(3):
        tensor = own_part(step, count, dtype)
        result = result + call(tensor, op, named).double()
        exact = exact + call(tensor.double(), op, "none")
        lost = lacking(compression, result)
        scale = exact.abs().max()
        assert lost.abs().max() > 1e-3 * scale
        # Of bfloat16, the result is rounded in each call.
        torch.testing.assert_close(
            result + lost, exact, rtol=0, atol=float(scale) * (1e-5 if dtype.itemsize > 2 else 0.05)
        )


@pytest.mark.parametrize(
    ("backend", "host_of", "piece_bytes", "method", "dtype"),
    [
        ("gloo", HOST_BY_HOST, 32 << 20, "onebit", torch.float32),
        ("gloo", ROUND_ROBIN, 1 << 10, "int4", torch.float32),
        ("ccl", ROUND_ROBIN, 1 << 10, "onebit", torch.float32),
        ("ccl", HOST_BY_HOST, 1 << 10, "topk", torch.float32),
        ("ccl", HOST_BY_HOST, 32 << 20, "onebit", torch.bfloat16),
    ],
)
def test_what_results_lack_is_in_the_state(
    bare_pools: Pools,
    backend: str,
    host_of: tuple[int, ...],
    piece_bytes: int,
    method: str,
    dtype: torch.dtype,
) -> None:
    bare_pools(4).run(on, backend, host_of, piece_bytes, nothing_is_lost, method, dtype)


def goes_on_from_what_was_saved(call: Callable[..., torch.Tensor], host_of: tuple[int, ...]) -> None:
    """Make the same calls with a state and with a copy, on the same hosts and then on others."""
    first = dist.Compression("onebit", between_hosts=True)
    for step in range(2):
        call(own_part(step, 4004, torch.float32), "avg", first.of("a"))
    second = dist.Compression("onebit", between_hosts=True)
    second.load_state_dict(first.state_dict())
    tensor = own_part(2, 4004, torch.float32)
    assert torch.equal(call(tensor, "avg", first.of("a")), call(tensor, "avg", second.of("a")))
    # Ranks that were on the same hosts are on others: the shares that they encode lie elsewhere.
    set_hosts(host_of)
    plans.forget_plans()
    group, result, exact = dist.new_group(list(range(4))), torch.zeros(()), torch.zeros(())
    before = lacking(first, call(tensor, "avg", "none"))
    third = dist.Compression("onebit", between_hosts=True)
    third.load_state_dict(first.state_dict())
    for step in range(3, 5):
        tensor = own_part(step, 4004, torch.float32)
        exact = exact + call(tensor, "avg", "none").double()
        if call is scattered:
            output = torch.empty(1001)
            dist.reduce_scatter_tensor(output, tensor, "avg", group, compression=third.of("a"))
        else:
            output = tensor.clone()
            dist.all_reduce(output, "avg", group, compression=third.of("a"))
        result = result + output.double()
        lost = lacking(third, output)
        torch.testing.assert_close(result + lost, exact + before, rtol=0, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize(
    ("host_of", "later", "call"),
    [
        (HOST_BY_HOST, ROUND_ROBIN, all_reduced),
        (HOST_BY_HOST, UNEVEN, scattered),
        (UNEVEN, ROUND_ROBIN, all_reduced),
        (ROUND_ROBIN, HOST_BY_HOST, scattered),
    ],
)
def test_a_saved_state_goes_on(
    bare_pools: Pools, host_of: tuple[int, ...], later: tuple[int, ...], call: Callable[..., torch.Tensor]
) -> None:
    bare_pools(4).run(on, "gloo", host_of, 1 << 12, goes_on_from_what_was_saved, call, later)


def small_losses_of_large_elements(call: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return the sum of elements whose neighbours in bfloat16 are two apart, and of losses of 0.5 on each rank."""
    compression = dist.Compression("fp16", error_feedback=True, between_hosts=True)
    saved = {"local": torch.full((1000,), 0.5), "other": torch.zeros(0), "average": False}
    compression.load_state_dict({"compression": repr(compression), "tensors": {"a": saved}})
    return call(torch.full((1000,), 256.0 * (-1) ** dist.get_rank(), dtype=torch.bfloat16), "sum", compression.of("a"))


@pytest.mark.parametrize("call", [all_reduced, scattered])
def test_losses_are_added_to_16_bit_elements_in_float32(bare_pools: Pools, call: Callable[..., torch.Tensor]) -> None:
    for found in bare_pools(4).run(on, "gloo", HOST_BY_HOST, 32 << 20, small_losses_of_large_elements, call):
        assert found.unique().tolist() == [2.0]


def saved_shares(world_size: int) -> list[dict[str, Any]]:
    compression = dist.Compression("int4", error_feedback=True, between_hosts=True)
    for step in range(3):
        all_reduced(own_part(step, 1000, torch.float32), "avg", compression.of("a"))
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, compression.state_dict())
    return dist.Compression.reshard(states, world_size)


def paid_back(states: list[dict[str, Any]], calls: int) -> torch.Tensor:
    """Return the sum of averages of zeros, into which ranks put what was lost before."""
    compression, total = dist.Compression("int4", error_feedback=True, between_hosts=True), torch.zeros(1000)
    compression.load_state_dict(states[dist.get_rank()])
    for _ in range(calls):
        total += all_reduced(torch.zeros(1000), "avg", compression.of("a"))
    return total


@pytest.mark.parametrize("host_of", [(0, 1), (0, 1, 0, 1, 0, 1)])
def test_shares_move_to_another_number_of_ranks(bare_pools: Pools, host_of: tuple[int, ...]) -> None:
    world_size = len(host_of)
    states = bare_pools(4).run(on, "gloo", ROUND_ROBIN, 1 << 10, saved_shares, world_size)[0]
    scale = world_size if states[0]["tensors"]["a"]["average"] else 1
    expected = sum(one["tensors"]["a"]["local"] for one in states) / scale
    assert expected.abs().max() > 0.05
    found = bare_pools(world_size).run(on, "gloo", host_of, 1 << 10, paid_back, states, 15)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=0.02 * float(expected.abs().max()))


def refused_states() -> list[str]:
    compression = dist.Compression("onebit", between_hosts=True)
    all_reduced(own_part(0, 1000, torch.float32), "sum", compression.of("a"))
    state = compression.state_dict()
    texts = []
    for damage in ({"sent": []}, {"count": 10}, {"summed": 3}, None):
        damaged = {**state["tensors"]["a"]}
        damaged["shares"] = None if damage is None else {**damaged["shares"], **damage}
        with pytest.raises(dist.ArgumentTypeError) as caught:
            compression.load_state_dict({**state, "tensors": {"a": damaged}})
        texts.append(str(caught.value))
    if dist.get_rank() == 3:
        compression.load_state_dict({**state, "tensors": {"a": {**state["tensors"]["a"], "rank": 2}}})
    with pytest.raises(dist.CollectiveMismatchError) as refused:
        all_reduced(own_part(0, 1000, torch.float32), "sum", compression.of("a"))
    texts.append(str(refused.value))
    return texts


def test_a_state_that_does_not_fit_is_refused_before_anything_is_sent(bare_pools: Pools) -> None:
    for texts in bare_pools(4).run(on, "gloo", HOST_BY_HOST, 1 << 10, refused_states):
        assert all(text.startswith("Compression.load_state_dict: tensors: got ") for text in texts[:4])
        assert "'a' is that of group rank 2; got a call of group rank 3" in texts[4]
