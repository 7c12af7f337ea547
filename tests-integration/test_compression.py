"""Compressed collectives on real ranks: every codec, collective, dtype, backend and world size keeps its bound."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import distributed_c10d
from world_helpers import BACKENDS, on

import comm_orchestrator as dist
from comm_collectives.compression import Codec, make_codec, pipeline, selection
from comm_collectives.compression.link import Link
from comm_utils import kernels
from comm_utils.active import active_backend
from comm_utils.errors import ArgumentError, ArgumentTypeError, CollectiveMismatchError, CommError, CommTimeoutError
from comm_utils.testing import RankPool, patience, run_ranks

Pools = Callable[[int], RankPool]

MOVING = ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int4", "int8", "none"]
CODECS = [*MOVING, "onebit", "topk"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def inputs(count: int, dtype: torch.dtype, ranks: int) -> list[torch.Tensor]:
    """Return what each rank has, the same on every rank."""
    random = torch.Generator().manual_seed(count)
    return [torch.randn(count, generator=random).to(dtype) for _ in range(ranks)]


def allowed(codec: Codec, parts: list[torch.Tensor], total: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the largest error of a sum of ``parts``, and of ``total`` encoded again: those of codec and dtype."""
    # Blocks begin elsewhere in a slice: the largest of all elements bounds every block.
    bound = sum(codec.bound(part.float().flatten()).max() for part in parts) if parts else torch.zeros(())
    magnitude = sum((part.float().abs().max() for part in parts), torch.zeros(()))
    if total is not None:
        bound = bound + codec.bound(total.float().flatten() + magnitude).max()
    return bound + magnitude * torch.finfo(dtype).eps * 2 + 1e-6


def in_both_ways(name: str, call: Callable[..., Any], output: Any, *arguments: Any) -> list[torch.Tensor]:
    """Return what ``call`` leaves in ``output``, which is the same where the call is asynchronous."""
    found = []
    for asynchronous in (False, True):
        written = [one.clone() for one in (output if isinstance(output, list) else [output])]
        given = written if isinstance(output, list) else written[0]
        # Error feedback begins anew, so that both ways have the same bits.
        compression = None if name == "none" else dist.Compression(name)
        work = call(given, *arguments, async_op=asynchronous, compression=compression)
        assert (work is not None) == asynchronous
        if work is not None:
            work.wait()
        found.append(written)
    assert all(map(same, *found, [name] * len(found[0]))), (name, call)
    return found[0]


def same(first: torch.Tensor, second: torch.Tensor, name: str) -> bool:
    """Say whether two calls gave one result: oneCCL itself adds what three and more ranks have as it arrives."""
    if name == "none" and os.environ.get("CCL_SHARED_MEMORY") == "0" and dist.get_world_size() > 2:
        eps = torch.finfo(first.dtype).eps
        return torch.allclose(first, second, rtol=4 * eps, atol=16 * eps)
    return torch.equal(first, second)


def are_near(found: torch.Tensor, exact: torch.Tensor, near: torch.Tensor) -> bool:
    return bool(((found.float() - exact.float()).abs() <= near).all())


def every_collective(name: str, dtype: torch.dtype, count: int) -> None:
    """Compare each collective of elements that differ by rank and by place, of slices of ``count`` elements."""
    rank, W = dist.get_rank(), dist.get_world_size()
    # Of one rank nothing is encoded; "none" is no compression: the codec itself is tested without a network.
    codec, where = make_codec(name if W > 1 else "none"), (name, dtype, count, W)
    everything = torch.randn(W, W, count, generator=torch.Generator().manual_seed(count)).to(dtype)
    mine, before = everything[rank], everything.clone()
    total = sum(one.float() for one in everything)
    for op, divisor in (("sum", 1), ("avg", W)):
        exact, near = total / divisor, allowed(codec, list(everything), total, dtype) / divisor
        (reduced,) = in_both_ways(name, dist.all_reduce, mine, op)
        assert are_near(reduced, exact, near), where
        everyones = [torch.empty_like(reduced) for _ in range(W)]
        dist.all_gather(everyones, reduced, compression="none")
        assert all(torch.equal(one, reduced) for one in everyones), where
        near = allowed(codec, list(everything[:, rank]), None, dtype) / divisor
        (part,) = in_both_ways(name, dist.reduce_scatter_tensor, torch.empty_like(mine[0]), mine.view(-1), op)
        assert are_near(part, exact[rank], near), where
        (listed,) = in_both_ways(name, dist.reduce_scatter, part, list(mine), op)
        assert same(listed, part, name), where
    if name not in ("onebit", "topk"):
        (gathered,) = in_both_ways(name, dist.all_gather_into_tensor, torch.empty_like(mine).view(-1), mine[0])
        rows = in_both_ways(name, dist.all_gather, [torch.empty_like(mine[0]) for _ in range(W)], mine[0])
        assert torch.equal(torch.cat(rows), gathered), where
        for row, sent in zip(rows, everything[:, 0], strict=True):
            assert are_near(row, sent, allowed(codec, [sent], None, dtype)), where
        (swapped,) = in_both_ways(name, dist.all_to_all_single, torch.empty_like(mine).view(-1), mine.view(-1))
        for row, sent in zip(swapped.view(W, count), everything[:, rank], strict=True):
            assert are_near(row, sent, allowed(codec, [sent], None, dtype)), where
        # Of any sizes, also of none.
        sizes = [[max(0, count - 3 * i - 5 * j) for j in range(W)] for i in range(W)]
        parts = [everything[r, rank, : sizes[r][rank]] for r in range(W)]
        lists = [mine[r, : sizes[rank][r]] for r in range(W)]
        received = in_both_ways(name, dist.all_to_all, [torch.empty_like(one) for one in parts], lists)
        for row, sent in zip(received, parts, strict=True):
            assert are_near(row, sent, allowed(codec, [sent] if sent.numel() else [], None, dtype)), where
    assert torch.equal(everything, before), where


#: The longest travel in two pieces.
COUNTS = [*((torch.float32, count) for count in (1, 1000, 140_001)), (torch.float16, 1000), (torch.bfloat16, 1000)]


def all_codecs() -> list[int]:
    """Return the pieces of the longest tensors, by codec."""
    for name in CODECS:
        for dtype, count in COUNTS:
            every_collective(name, dtype, count)
    most = max(count for _, count in COUNTS)
    links = [Link(active_backend(), None, make_codec(name)) for name in CODECS if name != "none"]
    return [len(link.pieces(most, torch.device("cpu"))) for link in links]


# Codecs meet no library: what differs is how it moves bytes, and how many ranks share them.
QUICK = [("gloo", 1), ("gloo", 2), ("gloo", 3), ("shared memory", 2), ("shared memory", 4), ("oneCCL", 2)]
EVERY = [(backend, size) for backend in BACKENDS for size in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [pytest.param(*one, marks=[] if one in QUICK else pytest.mark.slow) for one in EVERY],
)
def test_every_codec_and_collective_within_its_bound(bare_pools: Pools, backend: str, world_size: int) -> None:
    # Four ranks of oneCCL on two cores, which wait by looking, need a minute.
    for pieces in bare_pools(world_size).run(on, backend, all_codecs, timeout_s=240):
        assert min(pieces) > 1, pieces


def losses_of_ascending_elements() -> list[tuple[float, bool]]:
    """Return by how much losses of topk exceed the bound of their pieces at most, and whether some exceed the whole's.

    The other ranks have zeros. A reduce_scatter, and then an all_reduce.
    """
    rank, W, count = dist.get_rank(), dist.get_world_size(), 300_000
    codec, found = make_codec("topk"), []
    pieces = Link(active_backend(), None, codec).pieces(count, torch.device("cpu"))
    assert len(pieces) > 1
    source = torch.linspace(1, 2, W * count)
    slices = torch.split(source, count)
    by_piece = [torch.cat([codec.bound(one[place]) for place in pieces]) for one in slices]
    given = source.clone() if rank == W - 1 else torch.zeros(W * count)
    output = torch.empty(count)
    dist.reduce_scatter_tensor(output, given, compression=dist.Compression("topk"))
    dist.all_reduce(given, compression=dist.Compression("topk"))
    for lost, bound, whole in (
        ((output - slices[rank]).abs(), by_piece[rank], codec.bound(slices[rank])),
        ((given - source).abs(), torch.cat(by_piece), codec.bound(source)),
    ):
        found.append((float((lost - bound).max()), bool((lost > whole).any())))
    return found


def test_the_largest_elements_of_each_piece_arrive(bare_pools: Pools) -> None:
    encoded, own = bare_pools(2).run(on, "gloo", losses_of_ascending_elements)
    for excess, _ in (*encoded, *own):
        assert excess <= 0
    # Beyond the bound of the whole, as an element of a later piece was not sent; the own part is added as it is.
    assert [exceeds for _, exceeds in (*encoded, *own)] == [True, True, False, True]


def low_rank(dtype: torch.dtype, op: str) -> list[float]:
    """Return the relative errors of a matrix and of this rank's rows of it, in both kinds of calls."""
    rank, W = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(rank)
    # Gradients of rank 2 are sent without a loss by matrices of rank 4.
    matrix = (torch.randn(300, 2, generator=random) @ torch.randn(2, 200, generator=random)).to(dtype)
    exact, errors = matrix.float().clone(), []
    dist.all_reduce(exact, op)
    parts, own = list(torch.split(matrix, 300 // W)), torch.split(exact, 300 // W)[rank]
    for asynchronous in (False, True):
        compression = dist.Compression("powersgd", rank=2 * W)
        for _ in range(3):
            found, rows, listed = matrix.clone(), torch.empty_like(own, dtype=dtype), torch.empty_like(own, dtype=dtype)
            calls: list[tuple[Callable[..., Any], list[Any]]] = [
                (dist.all_reduce, [found]),
                (dist.reduce_scatter_tensor, [rows, matrix]),
                (dist.reduce_scatter, [listed, parts]),
            ]
            for call, given in calls:
                name = compression.of(call.__name__)
                work = call(*given, op, async_op=asynchronous, compression=name)
                assert (work is not None) == asynchronous
                if work is not None:
                    work.wait()
        everyones = [torch.empty_like(found) for _ in range(W)]
        dist.all_gather(everyones, found)
        assert all(torch.equal(one, found) for one in everyones)
        pairs = ((found, exact), (rows, own), (listed, own))
        errors += [float((one.float() - right).norm() / right.norm()) for one, right in pairs]
    vector = torch.ones(7, dtype=dtype)  # whose factors would be no smaller
    dist.all_reduce(vector, op, compression="powersgd")
    assert (vector == (W if op == "sum" else 1)).all()
    # Parts of any sizes, also of none, and of such a vector.
    sizes = [5 * r for r in range(W)]
    for scale in (1, 100):
        uneven = [torch.ones(scale * size, dtype=dtype) for size in sizes]
        part = torch.empty(scale * sizes[rank], dtype=dtype)
        dist.reduce_scatter(part, uneven, op, compression="powersgd")
        assert (part - (W if op == "sum" else 1)).abs().le(0.02).all()
    return errors


def low_ranks() -> list[list[float]]:
    return [[*low_rank(dtype, "sum"), *low_rank(dtype, "avg")] for dtype in DTYPES]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_low_rank_approximation(bare_pools: Pools, backend: str, world_size: int) -> None:
    for errors in bare_pools(world_size).run(on, backend, low_ranks):
        # What 16 bits round is of no low rank.
        for dtype, found in zip(DTYPES, errors, strict=True):
            assert max(found) < 1e-3 + torch.finfo(dtype).eps, (dtype, found)


def sums_with_feedback(method: str) -> float:
    """Return how far the mean of 60 compressed averages is from the average."""
    rank, W = dist.get_rank(), dist.get_world_size()
    # A codec that sends one magnitude for all needs long to make up for a few large elements.
    parts = [part.clamp(-1, 1) for part in inputs(20_000, torch.float32, W)]
    exact, compression = sum(parts) / W, dist.Compression(method, error_feedback=True).of("gradients")
    total = torch.zeros(20_000)
    for _ in range(60):
        tensor = parts[rank].clone()
        dist.all_reduce(tensor, "avg", compression=compression)
        total += tensor / 60
    return float((total - exact).abs().max())


def scattered_with_feedback() -> list[float]:
    """Return how far this rank's part of one average of many values is from the exact one, and of the mean of 60."""
    rank, W = dist.get_rank(), dist.get_world_size()
    matrices = torch.randn(W, 40, 30, generator=torch.Generator().manual_seed(0))
    exact, found = torch.split(matrices.mean(0), 40 // W)[rank], []
    compression, output = dist.Compression("powersgd", rank=6).of("gradients"), torch.empty(40 // W, 30)
    for _ in range(60):
        dist.reduce_scatter_tensor(output, matrices[rank], "avg", compression=compression)
        found.append(output.clone())
    return [float((torch.stack(some).mean(0) - exact).abs().max()) for some in (found[:1], found)]


def test_a_low_rank_reduce_scatter_makes_up_for_what_is_lost(bare_pools: Pools) -> None:
    for first, mean in bare_pools(2).run(on, "gloo", scattered_with_feedback):
        assert mean < 0.25 < first


def scattered_and_logged() -> list[tuple[str, str, int]]:
    dist.configure(enabled=True)
    dist.reset_log()
    for rows in (100, 4):  # the factors of four rows are no smaller
        dist.reduce_scatter_tensor(torch.empty(rows // 2, 60), torch.ones(rows, 60), compression="powersgd")
    found = [(row.name, row.method, row.wire_bytes) for row in dist.log_rows()]
    dist.configure(enabled=False)
    return found


def test_the_logger_knows_the_factors_of_a_reduce_scatter(bare_pools: Pools) -> None:
    for rows in bare_pools(2).run(on, "gloo", scattered_and_logged):
        assert sorted(rows) == [
            ("reduce_scatter_tensor", "powersgd(rank=4)", 4 * 120),
            ("reduce_scatter_tensor", "powersgd(rank=4)", 4 * 4 * (100 + 60)),
        ]


@pytest.mark.parametrize("method", ["int4", "onebit", "topk"])
def test_error_feedback_makes_up_for_what_is_lost(bare_pools: Pools, method: str) -> None:
    # Of topk, an element waits for up to 100 calls.
    limit = {"int4": 0.02, "onebit": 0.25, "topk": 1.0}[method]
    errors = bare_pools(2).run(on, "gloo", sums_with_feedback, method)
    assert all(0 < error < limit for error in errors), errors


def saved_and_restored() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    parts = inputs(5000, torch.float32, W)
    first = dist.Compression("int4", error_feedback=True)
    dist.all_reduce(parts[rank].clone(), "avg", compression=first.of("a"))
    other = dist.Compression("int4", error_feedback=True)
    other.load_state_dict(first.state_dict())
    results = []
    for one in (first, other):
        tensor = parts[rank].clone()
        dist.all_reduce(tensor, "avg", compression=one.of("a"))
        results.append(tensor)
    assert torch.equal(*results)
    with pytest.raises(
        ArgumentError, match=r"got the state of 'int4\(block_size=256\)\+error_feedback'; expected that"
    ):
        dist.Compression("int8", error_feedback=True).load_state_dict(first.state_dict())
    with pytest.raises(ArgumentError, match="'a' is that of 5000 elements; got a tensor of 7"):
        dist.all_reduce(torch.ones(7), compression=other.of("a"))


def test_state_is_saved_and_restored(bare_pools: Pools) -> None:
    bare_pools(2).run(on, "shared memory", saved_and_restored)


def with_another_default_dtype(dtype: torch.dtype) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for method in ("int4", "onebit", "topk", "powersgd"):
            compression = dist.Compression(method, error_feedback=True)
            for _ in range(2):
                tensor = inputs(200_000, torch.float32, W)[rank].view(400, 500)
                dist.all_reduce(tensor, compression=compression.of("a"))
            state = compression.state_dict()["tensors"]["a"]
            assert state["local"].dtype is state["other"].dtype is torch.float32
    finally:
        torch.set_default_dtype(usual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_state_is_float32_whatever_the_default_dtype_is(bare_pools: Pools, dtype: torch.dtype) -> None:
    bare_pools(2).run(on, "gloo", with_another_default_dtype, dtype)


def loaded_from_another_dtype() -> None:
    compression = dist.Compression("int4", error_feedback=True)
    saved = {"local": torch.ones(2, 50_000, dtype=torch.bfloat16).T, "other": torch.ones(0), "average": False}
    compression.load_state_dict({"compression": repr(compression), "tensors": {"a": saved}})
    tensor = torch.zeros(100_000)
    dist.all_reduce(tensor, compression=compression.of("a"))
    assert (tensor - dist.get_world_size()).abs().max() < 0.2
    with pytest.raises(dist.ArgumentTypeError):
        compression.load_state_dict({"compression": repr(compression), "tensors": {"b": {}}})
    assert list(compression.state_dict()["tensors"]) == ["a"]  # what could not be loaded changed nothing


def test_state_of_another_dtype_is_converted(bare_pools: Pools) -> None:
    bare_pools(2).run(on, "gloo", loaded_from_another_dtype)


def pending(method: str, steps: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Return this rank's state after some averages of the same tensors, and the sum of the averages."""
    rank, W = dist.get_rank(), dist.get_world_size()
    compression, total = dist.Compression(method, error_feedback=True), torch.zeros(1000)
    for _ in range(steps):
        tensor = torch.linspace(-1, 1, 1000) ** (rank + 1) if W == 3 else torch.zeros(1000)
        dist.all_reduce(tensor, "avg", compression=compression.of("a"))
        total += tensor
    return compression.state_dict(), total


def paid_back(method: str, states: list[dict[str, Any]], steps: int) -> torch.Tensor:
    """Return the sum of averages of zeros, into which ranks put what was lost before."""
    compression, total = dist.Compression(method, error_feedback=True), torch.zeros(1000)
    compression.load_state_dict(states[dist.get_rank()])
    for _ in range(steps):
        tensor = torch.zeros(1000)
        dist.all_reduce(tensor, "avg", compression=compression.of("a"))
        total += tensor
    return total


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_state_moves_to_another_number_of_ranks(bare_pools: Pools, world_size: int) -> None:
    outcomes = bare_pools(3).run(on, "gloo", pending, "int4", 3)
    states, total = [state for state, _ in outcomes], outcomes[0][1]
    expected = 3 * sum(torch.linspace(-1, 1, 1000) ** (rank + 1) for rank in range(3)) / 3
    lacking = expected - total
    assert lacking.abs().max() > 0.05
    moved = dist.Compression.reshard(states, world_size)
    later = bare_pools(world_size).run(on, "gloo", paid_back, "int4", moved, 12)
    assert (later[0] - lacking).abs().max() < 0.02


def disagreeing() -> str:
    rank = dist.get_rank()
    try:
        dist.all_reduce(torch.ones(1000), compression="int8" if rank else dist.Compression("int8", block_size=64))
    except CollectiveMismatchError as error:
        dist.all_reduce(torch.ones(1000), compression="int8")  # nothing was sent: the group works
        return str(error)
    return ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_that_disagree_about_the_codec(bare_pools: Pools, backend: str) -> None:
    for text in bare_pools(2).run(on, backend, disagreeing):
        assert text == (
            "the ranks disagree about a compressed collective, of which nothing was sent: rank 0: all_reduce of 1000 "
            "torch.float32 with int8(block_size=64); rank 1: all_reduce of 1000 torch.float32 with "
            "int8(block_size=256)"
        )


def of_two_operations() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    compression = dist.Compression("int4", error_feedback=True)
    for _ in range(2):  # the last ranks have no part of the sum of so few
        dist.all_reduce(torch.ones(10 * W), compression=compression.of("a"))
        dist.reduce_scatter_tensor(torch.empty(10), torch.ones(10 * W), compression=compression.of("a"))
    scattering = dist.Compression("int4", error_feedback=True)
    source = torch.linspace(-1, 1, 1000 * W)
    dist.reduce_scatter_tensor(torch.empty(1000), source, compression=scattering.of("a"))
    states: list[Any] = [None] * W
    for r in range(W):
        states[r] = scattering.state_dict()
        states[r]["tensors"]["a"]["rank"] = r
        for one in ("local", "other"):
            dist.broadcast(states[r]["tensors"]["a"][one], r)
    lost = sum(one["tensors"]["a"]["local"] for one in states)
    assert lost.abs().max() > 0.01
    for again in (1, W + 1, W):
        states = dist.Compression.reshard(states, again)
        torch.testing.assert_close(sum(one["tensors"]["a"]["local"] for one in states), lost)
    scattering.load_state_dict(states[rank])
    # By their place in memory, inputs that have to be copied have a state of their own, too.
    total, columns, unnamed = torch.zeros(1000), source.view(W, 1000).T.contiguous().T, dist.Compression("onebit")
    for _ in range(60):
        output = torch.empty(1000)
        dist.reduce_scatter_tensor(output, columns, "avg", compression=unnamed)
        total += output / 60
        others = torch.full((1000 * W,), 7.0)  # noqa: F841, takes the memory of copies
    assert len(unnamed._unnamed._states) == 1
    assert (total - source.view(W, 1000)[rank]).abs().max() < 0.2


@pytest.mark.parametrize("world_size", [2, 3])
def test_states_of_two_operations(bare_pools: Pools, world_size: int) -> None:
    bare_pools(world_size).run(on, "gloo", of_two_operations)


def lost_by(tensor: torch.Tensor) -> float:
    dist.init_distributed("gloo", verbose=False)
    dist.all_reduce(tensor, compression="onebit")
    dist.destroy_process_group()
    return float(tensor.abs().max())


def in_two_worlds() -> list[float]:
    tensor = torch.linspace(-1, 1, 1000)
    return [lost_by(tensor), lost_by(tensor.zero_())]


def test_no_error_feedback_reaches_the_next_world(bare_pools: Pools) -> None:
    for first, second in bare_pools(2).run(in_two_worlds):
        assert first > 0
        assert second == 0


def beside_a_plain_call() -> str:
    with pytest.raises(CollectiveMismatchError) as caught:
        dist.all_reduce(torch.ones(1000), compression="int8" if dist.get_rank() else None)
    return str(caught.value)


def test_a_compressed_call_beside_a_plain_one() -> None:
    for text in run_ranks(on, 2, "gloo", beside_a_plain_call, timeout_s=120):
        assert "rank 0 calls all_reduce(1000 elements of float32, op sum) (" in text
        assert "rank 1 calls all_reduce, by way of all_gather_into_tensor(" in text
        assert " elements of uint8) (" in text


def disagreements() -> list[str]:
    rank, found = dist.get_rank(), []
    error_feedback = dist.Compression("int4", error_feedback=True)
    dist.all_reduce(torch.linspace(-1, 1, 1000), compression=error_feedback.of("a"))
    before = error_feedback.state_dict()["tensors"]["a"]["local"]
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(torch.ones(30, 20), compression=dist.Compression("powersgd", rank=1 + rank)),
        lambda: dist.all_reduce(torch.ones(600).view(30 if rank else 20, -1), compression="powersgd"),
        lambda: dist.all_reduce(torch.ones(30, 20), compression="powersgd" if rank else "int8"),
        lambda: dist.reduce_scatter_tensor(
            torch.ones(300), torch.ones(600).view(30 if rank else 20, -1), compression="powersgd"
        ),
        lambda: dist.reduce_scatter(
            torch.ones(300),
            list(torch.split(torch.ones(600 + rank), [300, 300 + rank])[:: 1 - 2 * rank]),
            compression="powersgd",
        ),
        lambda: dist.all_reduce(torch.ones(100), "avg" if rank else "sum", compression="int8"),
        lambda: dist.all_reduce(torch.ones(1000), "avg" if rank else "sum", compression=error_feedback.of("a")),
    ]
    for call in calls:
        with pytest.raises(CollectiveMismatchError) as caught:
            call()
        found.append(str(caught.value).partition(": ")[2])
    assert torch.equal(error_feedback.state_dict()["tensors"]["a"]["local"], before)
    whole = torch.ones(10)
    dist.all_reduce(whole)
    assert (whole == dist.get_world_size()).all()
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_sent_where_ranks_disagree(bare_pools: Pools, backend: str) -> None:
    for found in bare_pools(2).run(on, backend, disagreements):
        assert found == [
            "rank 0: all_reduce of 30x20 torch.float32 with powersgd(rank=1); "
            "rank 1: all_reduce of 30x20 torch.float32 with powersgd(rank=2)",
            "rank 0: all_reduce of 20x30 torch.float32 with powersgd(rank=4); "
            "rank 1: all_reduce of 30x20 torch.float32 with powersgd(rank=4)",
            "rank 0: all_reduce of 600 torch.float32 with int8(block_size=256); "
            "rank 1: all_reduce of 30x20 torch.float32 with powersgd(rank=4)",
            "rank 0: reduce_scatter of 20x30 torch.float32 with powersgd(rank=4); "
            "rank 1: reduce_scatter of 30x20 torch.float32 with powersgd(rank=4)",
            "rank 0: reduce_scatter of 600 torch.float32 with powersgd(rank=4); "
            "rank 1: reduce_scatter of 601 torch.float32 in parts of 301, 300 with powersgd(rank=4)",
            "rank 0: all_reduce of 100 torch.float32 with int8(block_size=256); "
            "rank 1: all_reduce (avg) of 100 torch.float32 with int8(block_size=256)",
            "rank 0: all_reduce of 1000 torch.float32 with int4(block_size=256)+error_feedback; "
            "rank 1: all_reduce (avg) of 1000 torch.float32 with int4(block_size=256)+error_feedback",
        ]


def sizes_that_differ() -> list[str]:
    """Return the errors of exchanges in which rank 1 expects more of rank 0 than that sends."""
    rank, found = dist.get_rank(), []
    sent, expected = ([10, 100], [10, 7]) if rank == 0 else ([7, 5], [104, 5])
    whole, received = torch.ones(sum(sent)), torch.full((sum(expected),), -7.0)
    gathered = [torch.full((size,), -7.0) for size in ((100, 5) if rank == 0 else (104, 5))]
    small = dist.Compression("int8", min_size_bytes=1 << 20)
    calls: list[Callable[[], object]] = [
        lambda: dist.all_to_all_single(received, whole, expected, sent, compression="int8"),
        lambda: dist.all_to_all_single(received, whole, expected, sent, compression=small),
        lambda: dist.all_gather(gathered, torch.ones(100 if rank == 0 else 5), compression="int8"),
    ]
    for call in calls:
        with pytest.raises(CollectiveMismatchError) as caught:
            call()
        found.append(str(caught.value).partition(": ")[2])
    assert all((one == -7).all() for one in (received, *gathered))
    dist.all_reduce(summed := torch.ones(10))
    assert (summed == 2).all()
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_that_differ_by_less_than_a_message_rounds_up(bare_pools: Pools, backend: str) -> None:
    text = "rank 0 sends 100 elements to rank 1, which expects 104"
    assert bare_pools(2).run(on, backend, sizes_that_differ) == [[text] * 3] * 2


def after_an_overflow() -> None:
    W, compression = dist.get_world_size(), dist.Compression("powersgd", rank=2)
    for step in range(3):
        tensor = torch.ones(100, 50)
        if step == 1:
            tensor[0, 0] = float("inf")
        dist.all_reduce(tensor, compression=compression.of("a"))
        assert tensor.isfinite().all() == (step != 1)
    torch.testing.assert_close(tensor, torch.full((100, 50), float(W)))
    random = torch.randn(100, 50, generator=torch.Generator().manual_seed(1))
    exact, low_rank = random.clone(), random.clone()
    with torch.autocast("cpu", torch.bfloat16):
        dist.all_reduce(low_rank, compression=dist.Compression("powersgd", rank=2))
    dist.all_reduce(exact, compression=dist.Compression("powersgd", rank=2))
    assert torch.equal(low_rank, exact)


def test_low_rank_approximation_recovers_from_an_overflow(bare_pools: Pools) -> None:
    bare_pools(2).run(on, "gloo", after_an_overflow)


def by_default() -> None:
    W = dist.get_world_size()
    exact = torch.linspace(-1, 1, 100_000)
    dist.set_compression(dist.Compression("int4", min_size_bytes=1024))
    for _ in range(3):  # the third takes what fast path there is
        tensor, small, whole = exact.clone(), exact[:100].clone(), torch.ones(100_000, dtype=torch.int32)
        for one in (tensor, small, whole):
            dist.all_reduce(one)
        assert not torch.equal(tensor, W * exact)
        assert torch.equal(small, W * exact[:100])
        assert (whole == W).all()
        largest = exact.clone()
        dist.all_reduce(largest, "max")
        assert torch.equal(largest, exact)
        exempt = exact.clone()
        dist.all_reduce(exempt, compression="none")
        assert torch.equal(exempt, W * exact)
        sent = exact.clone()
        dist.broadcast(sent, 0)
        assert torch.equal(sent, exact)
    group = dist.new_group(list(range(W)))
    dist.set_compression("none", group)
    tensor = exact.clone()
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, W * exact)
    dist.set_compression(None)
    for _ in range(3):
        tensor = exact.clone()
        dist.all_reduce(tensor)
        assert torch.equal(tensor, W * exact)


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_are_compressed_by_default(bare_pools: Pools, backend: str) -> None:
    bare_pools(2).run(on, backend, by_default)


def slowed(call: Callable[..., Any]) -> Callable[..., Any]:
    def after_a_while(*args: Any) -> Any:
        time.sleep(0.11)
        return call(*args)

    return after_a_while


def methods_of(elements: int, given: Any) -> list[str]:
    """Return how a call of each operation travels, the last of which nobody knows to be small before it is made."""
    W = dist.get_world_size()
    tensor, whole = torch.ones(elements), torch.ones(elements * W)
    rows = []
    for call in (
        lambda: dist.all_reduce(tensor, compression=given),
        lambda: dist.all_reduce(tensor, compression=given, async_op=True).wait(),
        lambda: dist.all_gather(list(torch.empty_like(whole).view(W, -1)), tensor, compression=given),
        lambda: dist.all_gather_into_tensor(whole, tensor, compression=given),
        lambda: dist.reduce_scatter(tensor, list(whole.view(W, -1)), compression=given),
        lambda: dist.reduce_scatter_tensor(tensor, whole, compression=given),
        lambda: dist.all_to_all_single(torch.empty_like(whole), whole, compression=given),
    ):
        dist.configure(enabled=True)
        dist.reset_log()
        call()
        rows += dist.log_rows()
        dist.configure(enabled=False)
        dist.reset_log()
    return [row.method for row in rows]


def by_measurement(is_slow: str) -> list[list[str]]:
    """Return how small and larger calls travel where what is slow was made to be so: the codec, or anything else."""
    compression = dist.Compression("int8", min_size_bytes="auto")
    prepared_call = selection.prepared_call
    if is_slow == "codec":
        compression.codec.encode = slowed(compression.codec.encode)  # type: ignore[method-assign, union-attr]
    else:
        selection.prepared_call = lambda *args: slowed(prepared_call(*args))
    try:
        found = [methods_of(elements, compression) for elements in (1 << 9, 1 << 15)]
        dist.set_compression(compression)
        found += [methods_of(elements, None) for elements in (1 << 9, 1 << 15)]
        return [*found, methods_of(1 << 15, None)]  # once more, through what fast path there is
    finally:
        selection.prepared_call = prepared_call


@pytest.mark.parametrize(("is_slow", "expected"), [("codec", ""), ("network", "int8(block_size=256)")])
def test_groups_measure_from_which_size_on_compressing_pays(bare_pools: Pools, is_slow: str, expected: str) -> None:
    for small, large, *by_default in bare_pools(2).run(on, "gloo", by_measurement, is_slow):
        assert small[:-1] == [""] * 6
        assert large == [expected] * 7
        assert by_default == [small, large, large]


def refuse_to_choose(*_: Any) -> None:
    raise AssertionError("a call that travels as it is was checked again")


def on_the_fast_path() -> None:
    """Make calls that give a compression, or have one by default, and travel without it."""
    W, tensor, choose = dist.get_world_size(), torch.ones(1 << 15), selection.choose
    slow = dist.Compression("int8", min_size_bytes="auto")
    slow.codec.encode = slowed(slow.codec.encode)  # type: ignore[method-assign, union-attr]
    large = dist.Compression("int8", min_size_bytes=1 << 20)
    exempt = ("none", large, large.of("weights"), dist.Compression("int8", between_hosts=True), slow)
    try:
        for given, by_default in [*((one, None) for one in exempt), (None, large), (None, slow)]:
            dist.set_compression(by_default)
            for checked in (True, True, False):  # the first one measures
                selection.choose = choose if checked else refuse_to_choose
                dist.all_reduce(tensor.fill_(1.0), compression=given)
                dist.all_reduce(torch.ones(1), async_op=True, compression=given).wait()
            selection.choose = choose
            assert (tensor == W).all()
        for wrong, op in ((torch.ones(8, dtype=torch.int32), "sum"), (torch.ones(8), "max")):
            dist.all_reduce(wrong, op)
            with pytest.raises(dist.ArgumentError, match="int8 compresses"):
                dist.all_reduce(wrong, op, compression=large)
        dist.set_compression("int8")
        for given in exempt:  # beside a default that compresses
            exact = torch.linspace(0, 1, 1000)
            dist.all_reduce(exact, compression=given)
            assert torch.equal(exact, W * torch.linspace(0, 1, 1000))
            with pytest.raises(dist.ArgumentError, match="coalescing"), dist.coalescing():
                dist.all_reduce(torch.ones(1000), compression=given)
        group = dist.new_group([0])
        for given in exempt:
            alone = torch.ones(4)
            assert dist.all_reduce(alone, group=group, compression=given) is None  # on rank 1, too, which is no member
            assert (alone == 1).all()
            with pytest.raises(dist.ArgumentError, match="sparse"):
                dist.all_reduce(torch.ones(4).to_sparse(), compression=given)
        kept = dist.Compression("int8", min_size_bytes=1 << 20)
        dist.all_reduce(torch.ones(4), compression=kept)
        gone = weakref.ref(kept)
        del kept
        gc.collect()
        assert gone() is None
    finally:
        selection.choose = choose


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_that_are_not_compressed_take_the_fast_path(bare_pools: Pools, backend: str) -> None:
    bare_pools(2).run(on, backend, on_the_fast_path)


def every_choice() -> list[str]:
    """Return how large calls travel, as was really measured."""
    dist.set_compression(dist.Compression("fp16", min_size_bytes="auto"))
    return methods_of(1 << 20, None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_choose_alike(bare_pools: Pools, backend: str) -> None:
    first, *others = bare_pools(3).run(on, backend, every_choice)
    assert all(one == first for one in others)


def of_different_sizes() -> int:
    """Ranks have less or more than what is compressed by default, and agree all the same."""
    rank, W, plain = dist.get_rank(), dist.get_world_size(), 0
    dist.set_compression(dist.Compression("int4", min_size_bytes=4096))
    sizes = [100 if r == 0 else 5000 for r in range(W)]
    random = torch.Generator().manual_seed(rank)
    for _ in range(3):  # the third takes what fast path there is
        own = torch.randn(sizes[rank], generator=random)
        exact, gathered = ([torch.empty(size) for size in sizes] for _ in range(2))
        dist.all_gather(exact, own, compression="none")
        dist.all_gather(gathered, own)
        for r, (one, near) in enumerate(zip(gathered, exact, strict=True)):
            assert 0 < (one - near).abs().max() < 0.5
            everyones = one.clone()
            dist.broadcast(everyones, r)
            assert torch.equal(everyones, one)  # the own one was encoded as well
        wanted, swapped = torch.empty(sum(sizes)), torch.empty(sum(sizes))
        dist.all_to_all_single(wanted, own.repeat(W), sizes, [len(own)] * W, compression="none")
        dist.all_to_all_single(swapped, own.repeat(W), sizes, [len(own)] * W)
        assert 0 < (swapped - wanted).abs().max() < 0.5
        received = [torch.empty(size) for size in sizes]
        dist.all_to_all(received, [own] * W)
        assert torch.equal(torch.cat(received), swapped)
        scattered, output = torch.empty_like(own), torch.empty_like(own)
        inputs_ = [torch.randn(size, generator=random) for size in sizes]
        dist.reduce_scatter(scattered, inputs_, compression="none")
        dist.reduce_scatter(output, inputs_)
        assert 0 < (scattered - output).abs().max() < W
        # Input alone is as large as what is compressed.
        flat = torch.randn(1024 * W, generator=random)
        dist.reduce_scatter_tensor(scattered := torch.empty(1024), flat, compression="none")
        dist.reduce_scatter_tensor(output := torch.empty(1024), flat)
        assert not torch.equal(output, scattered)
        small = torch.full((10 + rank,), float(rank))
        few = [torch.empty(10 + r) for r in range(W)]
        for asynchronous in (False, True):
            work = dist.all_to_all(few, [small] * W, async_op=asynchronous)
            if asynchronous:
                work.wait()
            plain += sum(int((one == r).all()) for r, one in enumerate(few))
    dist.set_compression(None)
    return plain


def logged_when_small() -> list[tuple[str, int, int, str, int]]:
    """Return what is logged of exchanges of which the first two are too small to be compressed."""
    W = dist.get_world_size()
    dist.configure(enabled=True)
    dist.reset_log()
    for elements in (16, 1024):
        whole = torch.ones(elements * W)
        compression = dist.Compression("int8", min_size_bytes=4 * 1024 * W)
        dist.all_to_all_single(torch.empty_like(whole), whole, compression=compression)
        dist.all_to_all_single(torch.empty_like(whole), whole, compression=compression, async_op=True).wait()
    rows = [(row.name, row.size_bytes, row.calls, row.method, row.wire_bytes) for row in dist.log_rows()]
    dist.configure(enabled=False)
    return rows


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exchange_too_small_is_logged_as_it_travelled(bare_pools: Pools, backend: str) -> None:
    for rows in bare_pools(2).run(on, backend, logged_when_small):
        assert rows == [
            ("all_to_all_single", 128, 2, "", 0),
            ("all_to_all_single", 8192, 2, "int8(block_size=256)", 1024 + 16),
        ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_agree_on_what_is_too_small(bare_pools: Pools, backend: str) -> None:
    assert bare_pools(2).run(on, backend, of_different_sizes) == [12, 12]


def compiled() -> list[bool]:
    @torch.compile(backend="eager")
    def reduced(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor

    exact, found = torch.linspace(-1, 1, 10_000), []
    for compression in ("int4", None):
        torch.compiler.reset()
        dist.set_compression(compression)
        found.append(torch.equal(reduced(exact.clone()), dist.get_world_size() * exact))
    return found


def test_compiled_calls_are_compressed_by_default() -> None:
    # In processes of their own: torch keeps the graph, which holds the group and rank 0's store.
    assert run_ranks(on, 2, "gloo", compiled, timeout_s=120) == [[False, True]] * 2


def configured(config: dict[str, Any]) -> tuple[bool, float]:
    dist.init_distributed("gloo", verbose=False, config=config)
    exact = torch.linspace(-1, 1, 100_000)
    tensor = exact.clone()
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    dist.init_distributed("gloo", verbose=False)  # without the configuration, and so without compression
    again = exact.clone()
    dist.all_reduce(again)
    dist.destroy_process_group()
    return torch.equal(again, 2 * exact), float((tensor - 2 * exact).abs().max())


@pytest.mark.parametrize(
    ("config", "least", "most"),
    [
        ({}, 0, 0),
        ({"communication_data_type": "fp32", "compress_communication": False}, 0, 0),
        ({"communication_data_type": "fp16", "compress_communication": True}, 1e-5, 2e-3),
        ({"communication_data_type": "bf16"}, 1e-4, 2e-2),
        ({"compress_communication": {"method": "int4", "block_size": 64}}, 1e-3, 0.3),
        ({"compress_communication": {"method": "int4", "min_size_bytes": 1 << 20}}, 0, 0),
        ({"train_batch_size": 8, "compress_communication": {"method": "int8", "error_feedback": True}}, 1e-4, 2e-2),
    ],
)
def test_configuration(bare_pools: Pools, config: dict[str, Any], least: float, most: float) -> None:
    for plain, error in bare_pools(2).run(configured, config):
        assert plain
        assert least <= error <= most


def of_sequence_parallelism(config: dict[str, Any] | None) -> list[float]:
    """Return what averages lose: by default, on a group that has the named compression, and in a call that asks."""
    dist.init_distributed("gloo", verbose=False, config=config)
    group = dist.new_group(list(range(dist.get_world_size())))
    dist.set_compression("seq_parallel", group)
    found, exact = [], torch.linspace(-1, 1, 100_000)
    for options in ({}, {"group": group}, {"compression": "seq_parallel"}):
        for _ in range(3):  # the third takes what fast path there is
            tensor = exact.clone()
            dist.all_reduce(tensor, "avg", **options)
        found.append(float((tensor - exact).abs().max()))
    small = exact[:100].clone()
    dist.all_reduce(small, "avg", group=group)
    assert torch.equal(small, exact[:100])
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("config", "by_default", "named"),
    [
        (None, 0, 0),
        ({"seq_parallel_communication_data_type": "bf16"}, 0, 2**-9),
        ({"train_batch_size": 1, "communication_data_type": "fp16"}, 2**-12, 0),
        ({"communication_data_type": "fp16", "seq_parallel_communication_data_type": "bf16"}, 2**-12, 2**-9),
        ({"seq_parallel_communication_data_type": "fp32"}, 0, 0),  # after a world that had another one
    ],
)
def test_sequence_parallelism_has_a_data_type_of_its_own(
    bare_pools: Pools, config: dict[str, Any] | None, by_default: float, named: float
) -> None:
    for found in bare_pools(2).run(of_sequence_parallelism, config):
        for lost, largest in zip(found, (by_default, named, named), strict=True):
            assert largest / 4 <= lost <= 2 * largest, found


def saved_state(count: int, average: bool) -> dict[str, Any]:
    saved = {"local": torch.zeros(count), "other": torch.zeros(0), "average": average}
    return {"compression": "int8(block_size=256)+error_feedback", "tensors": {"w": saved}}


def refusals() -> list[str]:
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(torch.ones(4), compression="int7"),
        lambda: dist.all_reduce(torch.ones(4), compression=8),
        lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32), compression="int8"),
        lambda: dist.all_reduce(torch.ones(4, dtype=torch.float64), compression="fp16"),
        lambda: dist.all_reduce(torch.ones(4), "max", compression="int8"),
        lambda: dist.all_gather_into_tensor(torch.ones(4), torch.ones(4), compression="onebit"),
        lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), compression="topk"),
        lambda: dist.all_gather([torch.ones(4)], torch.ones(4), compression="powersgd"),
        lambda: dist.Compression("int8", ratio=0.5),
        lambda: dist.Compression("onebit", error_feedback=False),
        lambda: dist.Compression("int8", blocksize=64),  # type: ignore[call-arg]
        lambda: dist.Compression("int8").load_state_dict(None),  # type: ignore[arg-type]
        lambda: dist.Compression("int8").load_state_dict({"compression": "int8(block_size=256)"}),
        lambda: dist.Compression.reshard([1, 2], 2),  # type: ignore[list-item]
        lambda: dist.Compression.reshard([{"a": 1}], 2),
        lambda: dist.Compression.reshard([{"compression": "int8", "tensors": {"a": {"local": 1}}}], 2),
        lambda: dist.Compression.reshard([dist.Compression("int8").state_dict()], 1.5),  # type: ignore[arg-type]
        lambda: dist.Compression.reshard([], 2),
        lambda: dist.Compression.reshard([saved_state(10, True), saved_state(12, False)], 2),
        lambda: dist.Compression("int8", min_size_bytes=-1),
        lambda: dist.Compression("int8", min_size_bytes="automatic"),
        lambda: dist.Compression("powersgd", min_size_bytes="auto"),
        lambda: dist.Compression("powersgd", between_hosts=True),
        lambda: dist.set_compression("int7"),
        lambda: dist.set_compresion("int8"),  # type: ignore[attr-defined]
    ]
    found = []
    for call in calls:
        with pytest.raises((ArgumentError, ArgumentTypeError, AttributeError)) as caught:
            call()
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    return found


def test_refusals(bare_pools: Pools) -> None:
    ((*found, last),) = bare_pools(1).run(on, "gloo", refusals)
    expected = [
        "ArgumentError: all_reduce: compression: got 'int7'; expected one of bf16, fp16, fp8, ",
        "ArgumentTypeError: all_reduce: compression: got 8; expected one of bf16, ",
        "ArgumentError: all_reduce: compression: got a tensor of torch.int32; int8 compresses float32, float16 and",
        "ArgumentError: all_reduce: compression: got a tensor of torch.float64; fp16 compresses float32, float16 and",
        "ArgumentError: all_reduce: compression: got op 'max'; int8 compresses sums and averages",
        "ArgumentError: all_gather_into_tensor: compression: onebit compresses all_reduce and reduce_scatter alone",
        "ArgumentError: all_to_all_single: compression: topk compresses all_reduce and reduce_scatter alone",
        "ArgumentError: all_gather: compression: powersgd compresses all_reduce and reduce_scatter alone",
        "ArgumentError: compression: int8 does not take all of: ratio",
        "ArgumentError: compression: onebit is of no use without error feedback; leave it on",
        "ArgumentTypeError: Compression: blocksize: got an argument of this name, which does not exist; did you mean "
        "'block_size'?",
        "ArgumentTypeError: Compression.load_state_dict: got None; expected what state_dict() or reshard() returned",
        "ArgumentTypeError: Compression.load_state_dict: got {'compression': 'int8(block_size=256)'}; expected what ",
        "ArgumentTypeError: Compression.reshard: states[0]: got 1; expected what state_dict() returned",
        "ArgumentTypeError: Compression.reshard: states[0]: got {'a': 1}; expected what state_dict() returned",
        "ArgumentTypeError: Compression.reshard: states[0]: tensors: got {'a': {'local': 1}}; expected what ",
        "ArgumentTypeError: Compression.reshard: world_size: got 1.5; expected an integer",
        "ArgumentError: Compression.reshard: got 0 states for 2 ranks",
        "ArgumentError: Compression.reshard: got states of 'w' with 10, 12 elements, of averages, sums; expected the ",
        "ArgumentError: compression: min_size_bytes: got -1; expected 0 or more bytes, or 'auto'",
        "ArgumentError: compression: min_size_bytes: got 'automatic'; expected 0 or more bytes, or 'auto'",
        "ArgumentError: compression: min_size_bytes: got 'auto'; whether powersgd is faster depends on the shape of a "
        "tensor too; give a size",
        "ArgumentError: compression: between_hosts is not for powersgd, whose factors go through all_reduce as they ",
        "ArgumentError: set_compression: compression: got 'int7'; expected one of ",
    ]
    for text, begin in zip(found, expected, strict=True):
        assert text.startswith(begin), text
    assert last.startswith("AttributeError: ")


def logged() -> list[tuple[str, int, int, str, int]]:
    W = dist.get_world_size()
    dist.configure(enabled=True)
    dist.reset_log()
    tensor = torch.ones(1 << 20)
    dist.all_reduce(tensor, compression="int8")
    dist.all_reduce(tensor, compression="int8", async_op=True).wait()
    dist.all_reduce(tensor)
    dist.all_gather_into_tensor(torch.empty(W << 20), tensor, compression="fp16")
    rows = [(row.name, row.size_bytes, row.calls, row.method, row.wire_bytes) for row in dist.log_rows()]
    dist.configure(enabled=False)
    return rows


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_logger_knows_what_was_sent(bare_pools: Pools, backend: str) -> None:
    for rows in bare_pools(2).run(on, backend, logged):
        assert rows == [
            ("all_gather_into_tensor", 8 << 20, 1, "fp16", 2 << 20),
            ("all_reduce", 4 << 20, 1, "", 0),
            # Half of the elements to the other rank, and the sums of the other half.
            ("all_reduce", 4 << 20, 2, "int8(block_size=256)", 2 * ((1 << 19) + 4 * (1 << 11))),
        ]


def under_way() -> list[bool]:
    """Several at once, waited for in another order on every rank, with plain calls in between."""
    rank, W = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((200_000,), float(one + 1)) for one in range(6)]
    works = []
    for tensor in tensors:
        works.append(dist.all_reduce(tensor, async_op=True, compression="int8"))
        dist.barrier()
        check = torch.ones(10)
        dist.all_reduce(check)
        assert (check == W).all()
    for work in works if rank else reversed(works):
        assert work.wait()
        assert work.is_completed()
        assert work.exception() is None
    return [bool(((tensor - W * (one + 1)).abs() < 0.2).all()) for one, tensor in enumerate(tensors)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_asynchronous_calls_go_on_by_themselves(bare_pools: Pools, backend: str) -> None:
    assert bare_pools(2).run(on, backend, under_way) == [[True] * 6] * 2


def in_opposite_orders(has_begun: bool) -> list[tuple[float, str]]:
    """Return what each of two groups should sum to, and the sum or the error; rank 1 begins with the second one."""
    cases = [(value, dist.new_group([0, 1], timeout=10)) for value in (1.0, 100.0)]
    if has_begun:
        for _, group in cases:
            dist.all_reduce(torch.ones(4096), group=group, async_op=True, compression="int8").wait()
    if dist.get_rank():
        cases.reverse()
    tensors, works, found = [], [], []
    for value, group in cases:
        tensors.append(torch.full((4096,), value))
        try:
            works.append(dist.all_reduce(tensors[-1], group=group, async_op=True, compression="int8"))
        except CommError as error:
            found.append((2 * value, type(error).__name__))
    for work in works:
        work.wait()
    sums = [(2 * value, str(tensor[0].item())) for (value, _), tensor in zip(cases, tensors, strict=True)]
    return found or sums


@pytest.mark.parametrize("has_begun", [False, True])
def test_two_groups_of_the_same_ranks_never_exchange_their_calls(bare_pools: Pools, has_begun: bool) -> None:
    for found in bare_pools(2).run(on, "gloo", in_opposite_orders, has_begun):
        for expected, outcome in found:
            if has_begun or not outcome.endswith("Error"):
                assert float(outcome) == pytest.approx(expected, rel=0.01)


def by_the_names_of_the_world() -> list[str]:
    world = dist.get_world_group()
    dist.reset_log()
    dist.configure(enabled=True)
    for named in (world, None):
        dist.set_compression("int8", group=named)
        for group in (None, world):
            dist.all_reduce(torch.ones(1000), group=group)
        dist.set_compression(None, group=named)
    methods = [row.method for row in dist.log_rows() for _ in range(row.calls)]
    dist.configure(enabled=False)
    dist.reset_log()
    return methods


def test_a_default_of_the_world_serves_calls_by_both_of_its_names(bare_pools: Pools) -> None:
    for methods in bare_pools(2).run(on, "gloo", by_the_names_of_the_world):
        assert methods == ["int8(block_size=256)"] * 4


_ENDING = """
import torch
import comm_orchestrator as dist

dist.init_distributed("gloo", verbose=False)
works = [dist.all_reduce(torch.randn(4_000_000), async_op=True, compression="int8") for _ in range(10)]
"""


def test_a_process_may_end_while_calls_are_under_way(tmp_path: Path) -> None:
    script = tmp_path / "ending.py"
    script.write_text(_ENDING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


def of_a_group() -> tuple[bool, float]:
    """Return whether groups leave no thread behind, and how long a call of a group with a short timeout took."""
    rank, W = dist.get_rank(), dist.get_world_size()

    def held() -> tuple[int, int]:
        files = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the one for listing them
                files.append(os.readlink(f"/proc/self/fd/{number}"))
        # The watch opens the rings of other ranks as it finds them.
        return len(distributed_c10d._world.pg_map), sum(not one.endswith(".ring") for one in files)

    def make_use_and_destroy() -> None:
        group = dist.new_group(list(range(W)), timeout=2)
        dist.all_reduce(torch.ones(1000), group=group, async_op=True, compression="int8").wait()
        dist.destroy_process_group(group)

    make_use_and_destroy()
    before = held()
    for _ in range(3):
        make_use_and_destroy()
    # gloo closes its connections in a thread.
    end = time.monotonic() + patience()
    while held() > before and time.monotonic() < end:
        time.sleep(0.01)
    left_nothing = held() <= before
    group = dist.new_group(list(range(W)), timeout=2)
    dist.all_reduce(torch.ones(1000), group=group, async_op=True, compression="int8").wait()
    begin = time.monotonic()
    if rank == 0:
        # Before the timeout, the watch may find that rank 1 waits in the world instead.
        with pytest.raises((CommTimeoutError, CollectiveMismatchError)):
            dist.all_reduce(torch.ones(1000), group=group, async_op=True, compression="int8").wait()
    elapsed_s = time.monotonic() - begin
    dist.barrier()
    return left_nothing, elapsed_s


def test_the_second_group_ends_and_times_out_with_its_group(bare_pools: Pools) -> None:
    for left_nothing, elapsed_s in bare_pools(2).run(on, "gloo", of_a_group):
        assert left_nothing
        assert elapsed_s < 20


def destroyed_under_a_call() -> list[float]:
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1000), group=group, async_op=True, compression="int8").wait()
    tensor = torch.ones(1000)
    if dist.get_rank() == 1:
        time.sleep(0.3)  # the other rank destroys the group meanwhile
    work = dist.all_reduce(tensor, group=group, async_op=True, compression="int8")
    dist.destroy_process_group(group)
    work.wait()
    dist.barrier()
    return tensor.unique().tolist()


def test_a_group_is_destroyed_after_the_calls_that_are_under_way(bare_pools: Pools) -> None:
    for values in bare_pools(2).run(on, "gloo", destroyed_under_a_call):
        assert values == pytest.approx([2.0], rel=0.01)


def destroyed_by_torch() -> int:
    def threads() -> int:
        return sum(one.name == "comm-compression" for one in threading.enumerate())

    before = threads()
    for _ in range(3):
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1000), group=group, async_op=True, compression="int8").wait()
        torch.distributed.destroy_process_group(group)
    del group
    dist.destroy_process_group(dist.new_group([0, 1]))  # with which the backend forgets those that are gone
    gc.collect()
    end = time.monotonic() + patience()
    while threads() > before and time.monotonic() < end:
        time.sleep(0.01)
    return threads() - before


def test_groups_that_torch_destroys_leave_no_thread(bare_pools: Pools) -> None:
    assert bare_pools(2).run(on, "gloo", destroyed_by_torch) == [0, 0]


def lines_of_calls_under_way() -> list[str]:
    found, exchange = [], pipeline.all_reduce

    def noted(*given: Any) -> None:
        found.extend(one.name for one in traceback.extract_stack() if one.filename == __file__)
        exchange(*given)

    with mock.patch.object(pipeline, "all_reduce", noted):
        dist.all_reduce(torch.ones(1000), async_op=True, compression="int8").wait()
    return found


def test_a_call_under_way_is_made_at_the_line_of_the_program(bare_pools: Pools) -> None:
    assert bare_pools(2).run(on, "gloo", lines_of_calls_under_way) == [["lines_of_calls_under_way", "noted"]] * 2


def without_kernels() -> list[torch.Tensor]:
    found = []
    for name in CODECS:
        compression = None if name == "none" else dist.Compression(name, error_feedback=name != "fp16")
        for _ in range(2):
            tensor = inputs(30_001, torch.float32, dist.get_world_size())[dist.get_rank()]
            average = tensor.clone()
            dist.all_reduce(tensor, compression=compression)
            dist.all_reduce(average, "avg", compression=compression)
        found += [tensor, average]
    return found


def with_and_without_kernels() -> bool:
    native = without_kernels()
    saved = kernels.encode, kernels.decode, kernels.decode_reduce_encode
    kernels.encode = kernels.decode = kernels.decode_reduce_encode = lambda *_: False  # type: ignore[assignment]
    try:
        return all(map(torch.equal, native, without_kernels()))
    finally:
        kernels.encode, kernels.decode, kernels.decode_reduce_encode = saved


def test_torch_computes_the_bits_of_the_kernels(bare_pools: Pools) -> None:
    wire = torch.empty(8, dtype=torch.uint8)[:5]
    assert kernels.encode("int8", torch.ones(1), wire, 16, None)
    assert kernels.decode_reduce_encode("int8", [wire.clone()], torch.ones(1), 1, wire, 16, None)
    for world_size in (2, 3):
        assert all(bare_pools(world_size).run(on, "gloo", with_and_without_kernels))


def freed() -> tuple[bool, list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("comm").addHandler(handler)
    compression = dist.Compression("int4", error_feedback=True)
    kept = torch.empty(1000)
    for _ in range(20):
        kept.copy_(torch.linspace(-1, 1, 1000))
        dist.all_reduce(kept, "avg", compression=compression)
    with_kept = list(messages)
    for _ in range(20):
        gradient = torch.linspace(-1, 1, 1000)
        dist.all_reduce(gradient, "avg", compression=compression)
        del gradient
    logging.getLogger("comm").removeHandler(handler)
    states = len(compression._unnamed._states)
    copied = copy.deepcopy(compression)
    return states == 1 and not with_kept and not copied._unnamed._states, messages


def test_state_without_a_name_goes_with_its_memory(bare_pools: Pools) -> None:
    for as_expected, messages in bare_pools(2).run(on, "gloo", freed):
        assert as_expected
        (message,) = messages
        assert message.startswith("compression: the memory of 8 tensors was freed after one call")
