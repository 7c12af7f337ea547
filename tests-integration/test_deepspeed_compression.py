"""What DeepSpeed has or had of compressed communication, by its names, without DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from world_helpers import BACKENDS, on

import comm_orchestrator as dist
from comm_orchestrator.facade.deepspeed_compression import (
    CompressedBackend,
    MpiBackend,
    NcclBackend,
    WeightQuantizer,
    all_to_all_quant_reduce,
)
from comm_utils.errors import ArgumentError, ArgumentTypeError, CollectiveMismatchError, NotInitializedError
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]


def errors_for(count: int, W: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the errors of a tensor of ``count`` elements before the first call, padded as DeepSpeed does."""
    unit = W * 8 * W // torch.gcd(torch.tensor(W), torch.tensor(8)).item()
    padded = -(-count // unit) * unit
    return torch.zeros(padded), torch.zeros(padded // W)


# --- 1-bit Adam


def signs(values: torch.Tensor) -> torch.Tensor:
    """Return the signs of ``values``, 1 for 0, times the root of their mean square."""
    return torch.where(values >= 0, 1.0, -1.0) * values.square().mean().sqrt()


def reference(
    tensors: list[torch.Tensor], workers: list[torch.Tensor], servers: list[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Return the average, and the errors of all ranks afterwards: algorithm 1 of Tang et al., in float64."""
    count, W = tensors[0].numel(), len(tensors)
    inputs = [error.clone() for error in workers]
    for values, tensor in zip(inputs, tensors, strict=True):
        values[:count] += tensor
    sent = [signs(values) for values in inputs]
    sums = [part + error for part, error in zip((sum(sent) / W).chunk(W), servers, strict=True)]
    results = [signs(values) for values in sums]
    return (
        torch.cat(results)[:count],
        [values - one for values, one in zip(inputs, sent, strict=True)],
        [values - one for values, one in zip(sums, results, strict=True)],
    )


def differing(found: torch.Tensor, expected: torch.Tensor) -> int:
    return int(((found.double() - expected).abs() > 1e-4 * (1 + expected.abs())).sum())


def everyones(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [one.double() for one in dist.all_gather(tensor)]


def as_the_paper_says(count: int) -> int:
    """Return how many elements of five averages differ from the reference."""
    rank, W = dist.get_rank(), dist.get_world_size()
    backend, (worker, server) = CompressedBackend(), errors_for(count, W)
    found = 0
    for step in range(5):
        random = torch.Generator().manual_seed(step)
        tensors = [torch.randn(count, generator=random) * (r + 1) for r in range(W)]
        workers, servers = everyones(worker), everyones(server)
        expected, workers, servers = reference([one.double() for one in tensors], workers, servers)
        tensor = tensors[rank]
        assert backend.compressed_allreduce(tensor, worker, server, 0) is tensor
        found += differing(tensor, expected)
        found += differing(worker, workers[rank]) + differing(server, servers[rank])
    return found


@pytest.mark.parametrize("count", [1, 64, 1000, 70_001])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_it_is_the_algorithm_of_the_paper(bare_pools: Pools, world_size: int, count: int) -> None:
    # An element may be so close to 0 that its sign is another one in float32.
    limit = count // 10_000
    assert max(bare_pools(world_size).run(on, "gloo", as_the_paper_says, count)) <= limit


def nothing_is_lost(dtype: torch.dtype) -> None:
    rank, W, count, steps = dist.get_rank(), dist.get_world_size(), 5000, 20
    backend, (worker, server) = CompressedBackend(), errors_for(count, W)
    inputs = [torch.linspace(-1, 1, count) ** (r + 1) for r in range(W)]
    total = torch.zeros(count)
    for _ in range(steps):
        tensor = inputs[rank].to(dtype, copy=True).view(50, 100)
        total += backend.compressed_allreduce(tensor, worker, server, 0).view(-1).float()
        assert all(torch.equal(one, tensor) for one in dist.all_gather(tensor))
    lacking = worker / W
    dist.all_reduce(lacking)
    servers = torch.empty_like(worker)
    dist.all_gather_into_tensor(servers, server)
    exact = steps * sum(one.to(dtype).float() for one in inputs) / W
    rounding = steps * torch.finfo(dtype).eps
    assert (total + (lacking + servers)[:count] - exact).abs().max() < 1e-3 + rounding
    assert lacking.abs().max() > 0.01  # else there was nothing to find


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_results_lack_is_in_the_errors(
    bare_pools: Pools, backend: str, world_size: int, dtype: torch.dtype
) -> None:
    bare_pools(world_size).run(on, backend, nothing_is_lost, dtype)


def special_values() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    backend = MpiBackend(cuda_aware=True)
    assert (backend.rank, backend.size) == (rank, W)
    worker, server = torch.ones(16 * W), torch.ones(16)
    empty = torch.empty(0, 3)
    assert backend.compressed_allreduce(empty, worker, server, 0) is empty
    assert not worker.any()
    assert not server.any()
    for value in (torch.nan, torch.inf):
        tensor = torch.ones(16 * W)
        tensor[0] = value if rank == 0 else 1.0
        backend.compressed_allreduce(tensor, worker, server, 0)
        assert not tensor.isfinite().any()  # of all ranks: a step with it is visibly wrong everywhere
        assert worker.isfinite().all()
        assert server.isfinite().all()
        worker.zero_()
        server.zero_()
    tensor = torch.zeros(10)
    backend.compressed_allreduce(tensor, worker, server, 0)
    assert not tensor.any()


def test_special_values(bare_pools: Pools) -> None:
    bare_pools(2).run(on, "gloo", special_values)


class Mpu:
    """What Megatron and DeepSpeed pass as an object of model parallelism."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def get_data_parallel_group(self) -> Any:
        return self._group


def in_a_group() -> None:
    rank = dist.get_rank()
    group = dist.new_group([1, 2])
    if rank:
        backend = NcclBackend(Mpu(group))
        assert (backend.world_group, backend.rank, backend.size) == (group, rank - 1, 2)
        tensor = torch.full((16,), float(rank))
        backend.compressed_allreduce(tensor, torch.zeros(16), torch.zeros(8), 0)
        assert torch.equal(tensor, torch.full((16,), 1.5))
    dist.barrier()  # rank 0 has the store that the others need


def test_a_group_of_some_ranks(bare_pools: Pools) -> None:
    bare_pools(3).run(on, "gloo", in_a_group)


def wrong_calls() -> None:
    backend = CompressedBackend()
    tensor, worker, server = torch.linspace(-1, 1, 20), torch.full((32,), 0.5), torch.full((16,), 0.25)
    before = tensor.clone(), worker.clone(), server.clone()
    wrong: list[tuple[tuple[Any, Any, Any], type[Exception], str]] = [
        (([1.0], worker, server), ArgumentTypeError, r"tensor: got a list of 1; expected a tensor"),
        ((tensor, None, server), ArgumentTypeError, r"worker_error: got None; expected a tensor"),
        ((tensor.double(), worker, server), ArgumentError, r"tensor: got torch.float64; expected float32, float16 or"),
        ((tensor.int(), worker, server), ArgumentError, r"tensor: got torch.int32; expected float32, float16 or"),
        ((tensor, worker.half(), server), ArgumentError, r"worker_error: got torch.float16; expected float32"),
        ((tensor, worker, server.double()), ArgumentError, r"server_error: got torch.float64; expected float32"),
        ((tensor, worker[:18], server), ArgumentError, r"worker_error: got 18 elements; expected at least the 20 of"),
        ((tensor, worker[:31], server), ArgumentError, r"got 31 elements; .* a multiple of the world size of 2: pad"),
        ((tensor, worker, server[:8]), ArgumentError, r"server_error: got 8 elements .*; expected 16: those of worker"),
        ((tensor[::2], worker, server), ArgumentError, r"tensor: got a tensor of shape \(10,\) with strides \(2,\)"),
        ((worker[:20], worker, server), ArgumentError, r"got tensors that share memory; expected separate memory"),
        ((tensor.to_sparse(), worker, server), ArgumentTypeError, r"tensor: got a sparse tensor"),
        ((tensor.to("meta"), worker, server), ArgumentError, r"tensor: got a tensor on meta"),
    ]
    for arguments, kind, text in wrong:
        with pytest.raises(kind, match=f"^compressed_allreduce: .*{text}"):
            backend.compressed_allreduce(*arguments, 0)
    assert all(torch.equal(*pair) for pair in zip((tensor, worker, server), before, strict=True))
    dist.barrier()


def test_wrong_calls_raise_before_anything_is_sent(bare_pools: Pools) -> None:
    bare_pools(2).run(on, "gloo", wrong_calls)


def disagreeing() -> str:
    rank = dist.get_rank()
    backend, tensor, worker, server = CompressedBackend(), torch.ones(16), torch.zeros(32), torch.zeros(16)
    with pytest.raises(CollectiveMismatchError) as caught:
        backend.compressed_allreduce(tensor[: 16 - rank], worker, server, 0)
    assert torch.equal(tensor, torch.ones(16))
    assert not worker.any()
    backend.compressed_allreduce(tensor, worker, server, 0)  # nothing was sent: the group works
    return str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_with_different_tensors(bare_pools: Pools, backend: str) -> None:
    for text in bare_pools(2).run(on, backend, disagreeing):
        assert text.endswith(
            "rank 0: compressed_allreduce of 16 torch.float32 with errors of 32; "
            "rank 1: compressed_allreduce of 15 torch.float32 with errors of 32"
        )


def recorded() -> None:
    dist.configure(enabled=True)
    dist.reset_log()
    CompressedBackend().compressed_allreduce(torch.ones(1 << 20), torch.zeros(1 << 20), torch.zeros(1 << 19), 0)
    (row,) = dist.log_rows()
    assert (row.operation, row.size_bytes, row.calls) == ("all_reduce", 4 << 20, 1)
    assert row.method == "onebit(one scale)+error_feedback"
    assert row.wire_bytes < (4 << 20) / 31


def test_the_logger_counts_one_call(bare_pools: Pools) -> None:
    bare_pools(2).run(on, "gloo", recorded)


def test_before_a_world_exists() -> None:
    with pytest.raises(NotInitializedError):
        CompressedBackend()
    with pytest.raises(NotInitializedError, match="all_to_all_quant_reduce"):
        all_to_all_quant_reduce([], {})


# --- ZeRO++


def as_deepspeed_makes_them(L: int) -> dict[str, Any]:
    """Return the groups of ``deepspeed.utils.groups`` for hosts with ``L`` ranks."""
    W = dist.get_world_size()
    groups = {f"local_{host}": dist.new_group(range(host * L, host * L + L)) for host in range(W // L)}
    if W > L:
        groups |= {f"global_{one}": dist.new_group(range(one, W, L)) for one in range(L)}
    return groups


def reduced_in_int4(L: int, dtype: torch.dtype) -> float:
    """Return the largest error of averages of matrices, in units of their largest element."""
    rank, W = dist.get_rank(), dist.get_world_size()
    groups, worst = as_deepspeed_makes_them(L), 0.0
    shapes = [(64, 32), (1, 1), (3, 7), (50, 40, 3), (17,), (0, 4), ()]
    random = torch.Generator().manual_seed(1)
    inputs = [[torch.randn(shape, generator=random).to(dtype) for shape in shapes] for _ in range(W)]
    mine = inputs[rank]
    before = [one.clone() for one in mine]
    outputs = all_to_all_quant_reduce(mine, groups)
    exact = dist.reduce_scatter_coalesced(mine)
    assert all(torch.equal(*pair) for pair in zip(mine, before, strict=True))
    for position, (found, expected) in enumerate(zip(outputs, exact, strict=True)):
        assert (found.shape, found.dtype) == (expected.shape, dtype)
        if len(shapes[position]) < 2:
            assert torch.equal(found, expected)
        elif found.numel():
            largest = max(float(one[position].abs().max()) for one in inputs)
            worst = max(worst, float((found.float() - expected.float()).abs().max()) / largest)
    return worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("world_size", "L"), [(1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (4, 1)])
def test_gradients_are_averaged_in_int4(bare_pools: Pools, world_size: int, L: int, dtype: torch.dtype) -> None:
    hosts = world_size // L
    limit = ((L - 1) / L + (hosts - 1) / hosts) / 14 + 4 * torch.finfo(dtype).eps
    for worst in bare_pools(world_size).run(on, "gloo", reduced_in_int4, L, dtype):
        assert worst <= limit
        assert (worst > 0.01) == (world_size > 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_averaged_on_every_backend(bare_pools: Pools, backend: str) -> None:
    assert all(0.01 < worst < 0.08 for worst in bare_pools(4).run(on, backend, reduced_in_int4, 2, torch.float32))


def wrong_groups() -> None:
    groups, good = as_deepspeed_makes_them(2), torch.ones(8, 8)
    everyone = dist.get_world_group()
    strided = dist.new_group([0, 2]), dist.new_group([1, 3])
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        (good, groups, ArgumentTypeError, "tensors: got .*; expected a list of tensors"),
        ([1], groups, ArgumentTypeError, r"tensors\[0\]: got .*; expected a tensor"),
        ([good, good.long()], groups, ArgumentError, r"tensors\[1\]: got torch.int64; expected float32, float16"),
        ([good], None, ArgumentTypeError, "groups: got None; expected a dict of groups by name"),
        ([good], {}, ArgumentError, "groups: got .*of which rank . is in no local_ group"),
        ([good], {"world": everyone}, ArgumentError, "groups: got the name 'world'; expected local_0"),
        ([good], {"local_0": "gloo"}, ArgumentTypeError, r"groups\['local_0'\]: got 'gloo' of type str; expected a"),
        ([good], {f"local_{i}": one for i, one in enumerate(strided)}, ArgumentError, "expected consecutive ranks"),
        ([good], {k: v for k, v in groups.items() if k[0] == "l"}, ArgumentError, r"and every 2th rank"),
    ]
    for tensors, given_groups, kind, text in wrong:
        with pytest.raises(kind, match=f"^all_to_all_quant_reduce: .*{text}"):
            all_to_all_quant_reduce(tensors, given_groups)
    assert torch.equal(all_to_all_quant_reduce([good], groups)[0], torch.ones(16))


def test_wrong_groups_and_tensors(bare_pools: Pools) -> None:
    bare_pools(4).run(on, "gloo", wrong_groups)


def gathered(count: int, dtype: torch.dtype) -> float:
    """Return the largest error of gathered weights in units of the largest, as ZeRO-3 gathers them."""
    rank, W = dist.get_rank(), dist.get_world_size()
    weights = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    size = -(-count // W)
    padded = torch.zeros(W * size, dtype=dtype)
    padded[:count] = weights
    quantizer = WeightQuantizer()
    quantized, scales = quantizer.quantize(padded[rank * size :][:size])
    everyones = torch.empty(W * size, dtype=torch.int8)
    dist.allgather_fn(everyones, quantized)
    all_scales = torch.empty(W * scales.numel())
    dist.allgather_fn(all_scales, scales)
    found = quantizer.dequantize(everyones[:count], all_scales, dtype=dtype)
    assert found.dtype == dtype
    return float((found.float() - weights.float()).abs().max() / weights.float().abs().max())


@pytest.mark.parametrize("count", [1, 7, 4096, 10_007, 100_000])
def test_weights_are_gathered_in_int8(bare_pools: Pools, count: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for error in bare_pools(2).run(on, "gloo", gathered, count, dtype):
            assert error <= 1 / 254 + torch.finfo(dtype).eps


@given(
    st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=300), st.sampled_from([None, 1, 2, 3, 5])
)
def test_the_error_of_a_weight(values: list[float], groups: int | None) -> None:
    weights = torch.tensor(values, dtype=torch.float32)
    if groups is not None and len(values) % groups:
        with pytest.raises(ArgumentError, match=f"got {groups}; expected a divisor of {len(values)}"):
            WeightQuantizer().quantize(weights, groups)
        return
    quantized, scales = WeightQuantizer().quantize(weights, groups)
    assert (quantized.dtype, quantized.shape, scales.dtype) == (torch.int8, weights.shape, torch.float32)
    assert groups is None or scales.numel() == groups
    found = WeightQuantizer().dequantize(quantized, scales)
    largest = weights.double().view(scales.numel(), -1).abs().amax(1, keepdim=True)
    lost = (found.double() - weights.double()).view(scales.numel(), -1).abs()
    assert (lost <= largest / 254 * (1 + 1e-5) + 127 * 2.0**-126).all()


def test_weights_that_are_not_finite_stay_visible() -> None:
    weights = torch.ones(2, 64)
    weights[1, 3] = torch.inf
    quantized, scales = WeightQuantizer().quantize(weights, 2)
    found = WeightQuantizer().dequantize(quantized, scales)
    assert torch.equal(found[0], weights[0])
    assert found[1].isnan().all()
