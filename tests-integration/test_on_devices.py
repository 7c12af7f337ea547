"""The façade on NCCL, with as many ranks as there are devices; ``nox -s gpu`` runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.testing import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RANKS = [ranks for ranks in (1, 2, 4, 8) if ranks <= max(1, torch.cuda.device_count())]
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int16, torch.int32, torch.int64, torch.uint8)


def set_up() -> tuple[int, int, torch.device]:
    dist.init_distributed(verbose=False, timeout=60)
    assert dist.get_backend() == "cpu:gloo,cuda:nccl"
    device = torch.device("cuda", dist.get_local_rank())
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
    with pytest.raises(dist.ArgumentError, match="send: tag"):
        dist.send(tensor, (rank + 1) % W if W > 1 else 0, tag=1)
    mesh: Any = dist.init_device_mesh("cuda", (W,))
    assert mesh.size() == W
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("program", [reduce_everything, move_everything, overlap_groups_and_objects])
def test_facade(program: Any, ranks: int) -> None:
    run_ranks(program, ranks, timeout_s=200)
