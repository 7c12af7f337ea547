"""The façade on NCCL; where ranks have no device of their own, they share one. ``nox -s gpu`` runs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils import CommTimeoutError
from comm_utils.testing import run_ranks, sharing_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RANKS = (1, 2, 3)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int16, torch.int32, torch.int64, torch.uint8)


def set_up() -> tuple[int, int, torch.device]:
    dist.init_distributed(verbose=False, timeout=60)
    assert dist.get_backend() == "cpu:gloo,cuda:nccl"
    device = torch.device("cuda", dist.get_local_rank() % torch.cuda.device_count())
    assert torch.cuda.current_device() == device.index
    return dist.get_rank(), dist.get_world_size(), device


def reduce_everything() -> None:
    rank, W, device = set_up()
    total = W * (W + 1) // 2
    for dtype in DTYPES:
        for place in (device, torch.device("cpu")):  # gloo beside it serves the CPU
            tensor = torch.full((5,), rank + 1, dtype=dtype, device=place)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [total] * 5
            tensor = torch.full((5,), rank + 1, dtype=dtype, device=place)
            dist.reduce(tensor, 0, "max")
            assert tensor.tolist() == [W if rank == 0 else rank + 1] * 5
            output = torch.empty(2, dtype=dtype, device=place)
            dist.reduce_scatter_tensor(output, torch.full((2 * W,), rank + 1, dtype=dtype, device=place), "min")
            assert output.tolist() == [1, 1]
    average = torch.full((3,), rank + 1.0, dtype=torch.bfloat16, device=device)
    dist.all_reduce(average, "avg")
    assert average.tolist() == [(W + 1) / 2] * 3
    tensors = [torch.full((n,), rank + 1.0, device=device) for n in (1, 3, 5)]
    dist.all_reduce_coalesced(tensors)
    assert all((tensor == total).all() for tensor in tensors)
    dist.destroy_process_group()


def move_everything() -> None:
    rank, W, device = set_up()
    for dtype in (*DTYPES, torch.bool, torch.complex64):
        own = torch.full((3,), rank + 1, device=device).to(dtype)
        everyones = [torch.full((3,), one + 1, device=device).to(dtype) for one in range(W)]
        for found, expected in zip(dist.all_gather(own), everyones, strict=True):
            assert torch.equal(found, expected)
        output = torch.empty(3 * W, dtype=dtype, device=device)
        dist.all_gather_into_tensor(output, own)
        assert torch.equal(output, torch.cat(everyones))
        tensor = own.clone()
        dist.broadcast(tensor, W - 1)
        assert torch.equal(tensor, everyones[-1])
        exchanged = torch.empty(W, dtype=dtype, device=device)
        dist.all_to_all_single(exchanged, own[:1].repeat(W))
        assert torch.equal(exchanged, torch.cat([one[:1] for one in everyones]))
        gathered = [torch.empty_like(own) for _ in range(W)] if rank == 0 else None
        dist.gather(own, gathered, 0)
        if gathered is not None:
            assert all(map(torch.equal, gathered, everyones))
        dist.scatter(tensor, everyones if rank == 0 else None, 0)
        assert torch.equal(tensor, own)
    if W > 1:
        ring = torch.full((4,), float(rank), device=device)
        arrived = torch.empty_like(ring)
        operations = [dist.P2POp(torch.distributed.isend, ring, (rank + 1) % W)]
        operations.append(dist.P2POp(torch.distributed.irecv, arrived, (rank - 1) % W))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert arrived.tolist() == [(rank - 1) % W] * 4
    dist.barrier()
    dist.destroy_process_group()


def overlap_groups_and_objects() -> None:
    rank, W, device = set_up()
    works = [dist.all_reduce(torch.ones(1 << 20, device=device), async_op=True) for _ in range(8)]
    for work in works:
        assert work.wait()
        assert (work.result() == W).all()
        torch.cuda.synchronize()
        assert work.is_completed()
    group = dist.new_group(range(W))
    tensor = torch.ones(3, device=device)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [W] * 3
    dist.destroy_process_group(group)
    assert dist.allgather_object({"rank": rank}) == [{"rank": one} for one in range(W)]
    assert dist.broadcast_object([rank], 0) == [0]
    # What NCCL cannot do is refused by name.
    with pytest.raises(dist.ArgumentError, match="recv: src: missing"):
        dist.recv(tensor)
    if W > 1:
        with pytest.raises(dist.ArgumentError, match="send: tag"):
            dist.send(tensor, (rank + 1) % W, tag=1)
    mesh: Any = dist.init_device_mesh("cuda", (W,))
    assert mesh.size() == W
    dist.destroy_process_group()


def compress_and_compose() -> None:
    """Whatever is composed in Python gives on a device the bits of the CPU, which gloo serves in the same world."""
    rank, W, device = set_up()
    drawn = torch.randn(3, 40_003, generator=torch.Generator().manual_seed(rank))

    def both(call: Callable[[torch.Tensor], Any], source: torch.Tensor) -> None:
        found = []
        for place in (torch.device("cpu"), device):
            tensor = source.to(place, copy=True)  # which calls overwrite
            result = call(tensor)
            assert result is None or result.device == tensor.device
            found.append((tensor if result is None else result).cpu())
        assert torch.equal(*found), call

    def gather(codec: str, tensor: torch.Tensor) -> torch.Tensor:
        gathered = tensor.new_empty(9 * W)
        dist.all_gather_into_tensor(gathered, tensor, compression=codec)
        return gathered

    for codec in ("fp16", "bf16", "fp8_e4m3", "int8", "int4"):
        both(partial(dist.all_reduce, compression=codec), drawn)
        both(partial(gather, codec), drawn[0, :9])
    both(lambda tensor: dist.all_reduce(tensor, "avg", compression="int8"), drawn.bfloat16())
    state = [dist.Compression("onebit"), dist.Compression("onebit")]
    for _ in range(3):
        both(lambda tensor: dist.all_reduce(tensor, compression=state[tensor.is_cuda].of("gradient")), drawn)

    def coalesce(tensor: torch.Tensor) -> None:
        with dist.coalescing():
            for row in tensor:
                dist.all_reduce(row)
            dist.all_reduce(whole := torch.full((3,), rank, device=tensor.device))
        assert whole.tolist() == [W * (W - 1) // 2] * 3

    both(coalesce, drawn.to(torch.int32))
    for place in ("cpu", device):
        tensor = drawn.to(place, copy=True)
        dist.set_deterministic_reductions(True)
        dist.all_reduce(tensor)
        alone = drawn[1].to(place, copy=True)
        dist.all_reduce(alone)
        assert torch.equal(tensor[1], alone)
        dist.set_deterministic_reductions(False)
    dist.destroy_process_group()


def serve_devices_by_gloo() -> None:
    """All of the API on tensors of a device where gloo serves them; its messages go through the host's memory."""
    dist.init_distributed("gloo", verbose=False, timeout=60)
    rank, W = dist.get_rank(), dist.get_world_size()
    peer = (rank + 1) % W
    tensor = torch.full((5, 2), float(rank), device="cuda").t()
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        received = torch.empty(2, 5, device="cuda")
        dist.recv(received, 0)
        assert (received == 0).all()
    arrived = torch.empty(2, 5, device="cuda")
    works = [dist.isend(tensor, peer), dist.irecv(arrived, (rank - 1) % W)]
    for work in works:
        work.wait()
    assert (arrived == (rank - 1) % W).all()
    arrived.zero_()
    batch = [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, arrived, (rank - 1) % W)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert (arrived == (rank - 1) % W).all()
    for _ in range(2):
        total = torch.ones(3, device="cuda")
        dist.all_reduce(total)
        assert total.tolist() == [W] * 3
    dist.destroy_process_group()


def wait_for_too_short_a_time() -> None:
    rank, W, device = set_up()
    tensor = torch.full((4,), rank + 1.0, device=device)
    dist.all_reduce(tensor.clone())
    torch.cuda._sleep(2 * 10**9)
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(CommTimeoutError, match="still under way"):
        work.wait(0.05)
    assert work.wait(60)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [W * W * (W + 1) / 2] * 4
    dist.destroy_process_group()


PROGRAMS = [
    reduce_everything,
    move_everything,
    overlap_groups_and_objects,
    compress_and_compose,
    wait_for_too_short_a_time,
]


def test_gloo() -> None:
    run_ranks(serve_devices_by_gloo, 2, timeout_s=100)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_facade(program: Any, ranks: int) -> None:
    env = {} if ranks <= torch.cuda.device_count() else sharing_device(ranks)
    run_ranks(program, ranks, timeout_s=200, env=env)
