"""What users run on top of ``torch.distributed``, in one process with our calls: DDP, FSDP2, DTensor, compilers."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as c10d

import comm_orchestrator as dist
from comm_utils.errors import CollectiveMismatchError
from comm_utils.testing import RankPool, run_ranks

Pools: TypeAlias = Callable[[int], RankPool]
Function: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

STEPS, BATCH = 4, 8


def small_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 4))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 4, generator=generator)


def train(model: torch.nn.Module, own: slice) -> list[float]:
    """Train on the part ``own`` of each batch; return the losses on it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        inputs, wanted = batch(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[own]), wanted[own])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def own_part(group: Any = None) -> slice:
    each = BATCH // dist.get_world_size(group)
    return slice(dist.get_rank(group) * each, (dist.get_rank(group) + 1) * each)


def check_like_alone(model: torch.nn.Module, losses: list[float], group: Any = None) -> None:
    """Weights, last gradients and the average of the losses are those of one process with the whole batch."""
    alone = small_model()
    expected = train(alone, slice(None))
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-5)
    average = torch.tensor(losses)
    dist.all_reduce(average, "avg", group)
    torch.testing.assert_close(average, torch.tensor(expected), rtol=1e-4, atol=1e-5)


# --- DDP


def run_ddp(in_subgroup: bool) -> None:
    from torch.nn.parallel import DistributedDataParallel

    group = dist.new_group([0, 2]) if in_subgroup else None
    if in_subgroup and dist.get_rank() == 1:
        return
    model = small_model()
    if dist.get_rank(group) == 1:
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
    dist.barrier(group)
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1)
    losses = train(wrapped, own_part(group))
    check_like_alone(model, losses, group)
    weights = dist.all_gather(model[0].weight.detach(), group)  # type: ignore[index]
    assert torch.equal(*weights)
    if in_subgroup:
        dist.destroy_process_group(group)


def test_ddp(pools: Pools) -> None:
    pools(2).run(run_ddp, False)


def test_ddp_in_a_group_of_ours(pools: Pools) -> None:
    pools(3).run(run_ddp, True)


def run_ddp_with_builtin_hooks() -> None:
    """DDP's hooks in C++ read the future of our handle: one in half precision, and one with all bits."""
    from torch.nn.parallel import DistributedDataParallel

    def gradients(kind: str | None) -> list[torch.Tensor]:
        model = small_model()
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
        if kind is not None:
            wrapped._register_builtin_comm_hook(getattr(c10d.BuiltinCommHookType, kind))
        for step in range(2):  # the buckets of the first step are made anew for the second
            model.zero_grad()
            inputs, wanted = batch(step)
            torch.nn.functional.mse_loss(wrapped(inputs[own_part()]), wanted[own_part()]).backward()
        return [found for one in model.parameters() if (found := one.grad) is not None]

    plain, compressed = gradients(None), gradients("FP16_COMPRESS")
    for found, expected in zip(gradients("ALLREDUCE"), plain, strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(compressed, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
    assert any(not torch.equal(found, expected) for found, expected in zip(compressed, plain, strict=True))
    for one in compressed:
        assert torch.equal(*dist.all_gather(one))


def test_ddp_with_builtin_hooks(pools: Pools) -> None:
    pools(2).run(run_ddp_with_builtin_hooks)


def run_ddp_with_sparse_gradients() -> None:
    """An embedding whose gradient has the rows that a rank looked up, and no others."""
    from torch.nn.parallel import DistributedDataParallel

    rank, W = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(50, 4, sparse=True, mode="sum"), torch.nn.Linear(4, 1))
    alone = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model)
    words = [torch.arange(7 * of, 7 * of + 6 * (of + 1)).view(of + 1, 6) % 50 for of in range(W)]
    for _ in range(2):
        model.zero_grad()
        wrapped(words[rank]).sum().backward()
    for of in range(W):
        (alone(words[of]).sum() / W).backward()
    found, expected = model[0].weight.grad, alone[0].weight.grad
    assert found is not None
    assert expected is not None
    assert found.is_sparse
    torch.testing.assert_close(found.to_dense(), expected.to_dense())
    torch.testing.assert_close(model[1].weight.grad, alone[1].weight.grad)


@pytest.mark.parametrize("W", [1, 2, 3])
def test_ddp_with_sparse_gradients(pools: Pools, W: int) -> None:
    pools(W).run(run_ddp_with_sparse_gradients)


def run_sparse_sums() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    for nonzero in (rank, 0, 3):  # different numbers on each rank, none anywhere, the same everywhere
        for dense_dims in (0, 1):
            shape = (5, 6, 2)[: 2 + dense_dims]
            places = torch.tensor([[(rank + one) % 5 for one in range(nonzero)], list(range(nonzero))])
            values = torch.full((nonzero, *shape[2:]), rank + 1.0, dtype=torch.float64)
            tensor = torch.sparse_coo_tensor(places.view(2, nonzero), values, shape)
            mine = tensor.to_dense()
            expected = sum(dist.all_gather(mine))
            c10d.all_reduce(tensor)
            assert tensor.is_sparse
            torch.testing.assert_close(tensor.to_dense(), expected)
    if dist.get_backend() == "ccl":
        if W > 1:
            with pytest.raises(CollectiveMismatchError, match="expected the same on every rank"):
                c10d.all_reduce(torch.eye(3 + rank).to_sparse())
        with pytest.raises(ValueError, match="op: got 'max' of a sparse tensor; expected 'sum'"):
            c10d.all_reduce(torch.eye(3).to_sparse(), c10d.ReduceOp.MAX)
        with pytest.raises(TypeError, match=r"got the layout torch\.sparse_csr"):
            c10d.all_reduce(torch.eye(3).to_sparse_csr())
    check_works()


def check_works() -> None:
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [dist.get_world_size()] * 2


@pytest.mark.parametrize("W", [1, 2, 3])
def test_sums_of_sparse_tensors(pools: Pools, W: int) -> None:
    pools(W).run(run_sparse_sums)


# --- FSDP2


def run_fsdp() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = dist.init_device_mesh("cpu", (2,))
    model: Any = small_model()
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model[0].weight, DTensor)
    assert model[0].weight.to_local().shape == (8, 6)
    losses = train(model, own_part())

    alone = small_model()
    expected = train(alone, slice(None))
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor().detach(), wanted.detach(), rtol=1e-4, atol=1e-5)
    average = torch.tensor(losses)
    dist.all_reduce(average, "avg", mesh.get_group())
    torch.testing.assert_close(average, torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_fsdp(pools: Pools) -> None:
    pools(2).run(run_fsdp)


# --- DeviceMesh and DTensor


def run_mesh() -> tuple[list[float], list[float]]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for name in ("dp", "tp"):
        tensor = torch.tensor([2.0 ** dist.get_rank()])
        dist.all_reduce(tensor, group=mesh.get_group(name))
        found.append(tensor.item())
    parts = dist.all_gather(torch.tensor([float(dist.get_rank())]), mesh["dp"].get_group())
    return found, [part.item() for part in parts]


def test_mesh(pools: Pools) -> None:
    assert pools(4).run(run_mesh) == [
        ([5.0, 3.0], [0.0, 2.0]),
        ([10.0, 3.0], [1.0, 3.0]),
        ([5.0, 12.0], [0.0, 2.0]),
        ([10.0, 12.0], [1.0, 3.0]),
    ]


def run_dtensor() -> tuple[str, float]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2,))
    left, right = torch.arange(24.0).reshape(4, 6), torch.arange(12.0).reshape(6, 2)
    by_columns, by_rows = distribute_tensor(left, mesh, [Shard(1)]), distribute_tensor(right, mesh, [Shard(0)])
    product = by_columns @ by_rows
    assert torch.equal(product.full_tensor(), left @ right)
    partial = product.to_local().clone()
    assert not torch.equal(partial, left @ right)
    dist.all_reduce(partial, group=mesh.get_group())
    assert torch.equal(partial, left @ right)
    assert torch.equal(product.redistribute(mesh, [Replicate()]).to_local(), partial)
    with pytest.raises(TypeError) as raised:
        dist.all_reduce(product)
    column = by_columns.to_local().sum().reshape(1)
    dist.all_reduce(column)
    return str(raised.value), column.item()


def test_dtensor(pools: Pools) -> None:
    message = "all_reduce: tensor: got a DTensor; pass tensor.to_local(), this rank's part"
    assert pools(2).run(run_dtensor) == [(message, 276.0)] * 2


# --- code that calls torch.distributed itself


def strategy_of_lightning() -> dict[str, Any]:
    """The calls that a strategy of PyTorch Lightning makes."""
    assert c10d.is_available()
    assert c10d.is_initialized()
    rank, W = c10d.get_rank(), c10d.get_world_size()
    name = [f"run-{rank}"]
    c10d.broadcast_object_list(name, 0, group=c10d.group.WORLD)
    gathered = [torch.zeros(2) for _ in range(W)]
    c10d.barrier()
    c10d.all_gather(gathered, torch.full((2,), float(rank)))
    reduced = torch.tensor([rank + 1.0])
    c10d.all_reduce(reduced, op=c10d.ReduceOp.SUM)
    metric = torch.tensor([rank + 1.0])
    c10d.reduce(metric, dst=0, op=c10d.ReduceOp.SUM)
    return {
        "name": name[0],
        "gathered": torch.stack(gathered).tolist(),
        "mean": (reduced / W).item(),
        "metric": (metric / W).item() if rank == 0 else None,
    }


def script_of_hugging_face() -> dict[str, Any]:
    rank, W = c10d.get_rank(), c10d.get_world_size()
    objects: list[Any] = [None] * W
    c10d.all_gather_object(objects, {"rank": rank})
    predictions = [None] * W if rank == 0 else None
    c10d.gather_object(("label", rank), predictions, dst=0)
    c10d.monitored_barrier()
    group = c10d.new_group([0, 1])
    flat = torch.empty(2 * W, dtype=torch.int64)
    c10d.all_gather_into_tensor(flat, torch.tensor([rank, 10 * rank]), group=group)
    work = c10d.broadcast(same := torch.tensor([rank]), 1, group=group, async_op=True)
    work.wait()
    c10d.destroy_process_group(group)
    return {"objects": objects, "predictions": predictions, "flat": flat.tolist(), "same": same.item()}


def ours_between() -> list[Any]:
    rank = dist.get_rank()
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, "avg")
    return [tensor.item(), dist.allgather_object({"rank": rank}), [part.item() for part in dist.all_gather(tensor)]]


def in_one_process() -> tuple[Any, ...]:
    return ours_between(), strategy_of_lightning(), ours_between(), script_of_hugging_face(), ours_between()


def run_ours_first() -> tuple[Any, ...]:
    dist.init_distributed("gloo", verbose=False)
    found = in_one_process()
    dist.barrier()
    dist.destroy_process_group()
    assert not c10d.is_initialized()
    return found


def run_theirs_first() -> tuple[Any, ...]:
    """The program sets torch.distributed up, uses it and wraps its model; our layer comes last."""
    from torch.nn.parallel import DistributedDataParallel

    c10d.init_process_group("gloo")
    early = strategy_of_lightning()
    model = small_model()
    wrapped = DistributedDataParallel(model)
    with pytest.raises(dist.NotInitializedError, match=r"which adopts the world that torch\.distributed has$"):
        dist.barrier()
    dist.init_distributed(verbose=False)
    check_like_alone(model, train(wrapped, own_part()))
    found = in_one_process()
    assert early == found[1]
    dist.barrier()
    c10d.destroy_process_group()
    assert not dist.is_initialized()
    return found


@pytest.mark.parametrize("target", [run_ours_first, run_theirs_first])
def test_code_that_calls_torch_itself(rank_environment: dict[str, Any], target: Callable[[], Any]) -> None:
    found = run_ranks(target, 2, timeout_s=90, env=rank_environment)
    ours = [1.5, [{"rank": 0}, {"rank": 1}], [1.5, 1.5]]
    for rank, (before, lightning, between, hugging_face, after) in enumerate(found):
        assert before == between == after == ours
        assert lightning == {
            "name": "run-0",
            "gathered": [[0.0, 0.0], [1.0, 1.0]],
            "mean": 1.5,
            "metric": 1.5 if rank == 0 else None,
        }
        assert hugging_face == {
            "objects": [{"rank": 0}, {"rank": 1}],
            "predictions": [("label", 0), ("label", 1)] if rank == 0 else None,
            "flat": [0, 0, 1, 10],
            "same": 1,
        }


# --- torch.compile


def in_place(call: Callable[..., Any], *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Function:
    """A function to compile: some arithmetic, the call on the result, and more arithmetic."""

    def function(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor * 2 if dtype is None else (tensor * 2).to(dtype)
        work = call(changed, *args, **kwargs)
        if work is not None:
            work.wait()
        return changed + 1

    return function


def reduced_with_a_complex_one(tensor: torch.Tensor) -> torch.Tensor:
    tensors = [tensor * 2, tensor.to(torch.complex64)]
    dist.all_reduce_coalesced(tensors)
    return tensors[0] + tensors[1]


def into_another(call: Callable[..., Any], count: int, *args: Any, **kwargs: Any) -> Function:
    """The same for calls from one tensor to another of ``count`` elements."""

    def function(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor * 2
        output = tensor.new_empty(count)
        work = call(output, tensor, *args, **kwargs)
        if work is not None:
            work.wait()
        return output + 1

    return function


def by_alias(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor * 2
    output = tensor.new_empty(8)
    dist.all_gather_into_tensor(output=output, input=tensor)
    return output + 1


def int16_gathered(tensor: torch.Tensor) -> torch.Tensor:
    small = (tensor * 2).to(torch.int16)
    output = small.new_empty(8)
    dist.all_gather_into_tensor(output, small)
    return output + 1


def dtypes_mixed_up(tensor: torch.Tensor) -> torch.Tensor:
    output = tensor.new_empty(8, dtype=torch.float64)
    try:
        dist.all_gather_into_tensor(output, tensor)
    except ValueError:
        return tensor + 1
    return output


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    square = tensor.repeat(4, 1).t()
    dist.all_reduce(square)
    return square + 1


def with_an_unknown_op(tensor: torch.Tensor) -> torch.Tensor:
    try:
        dist.all_reduce(tensor, "mean")
    except ValueError:
        return tensor + 1
    return tensor


def from_a_wrong_root(tensor: torch.Tensor) -> torch.Tensor:
    try:
        dist.broadcast(tensor, True)
    except (TypeError, ValueError):
        return tensor + 1
    return tensor


def one_tensor_gathered(tensor: torch.Tensor) -> torch.Tensor:
    first, second = dist.all_gather(tensor * 2)
    return first + 3 * second


def asynchronously_gathered(tensor: torch.Tensor) -> torch.Tensor:
    first, second = dist.all_gather(tensor * 2, async_op=True).result()
    return first + 3 * second


def list_gathered(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor * 2)
    return parts[0] + 3 * parts[1]


def list_reduced(tensor: torch.Tensor) -> torch.Tensor:
    output = tensor.new_empty(2)
    dist.reduce_scatter(output, list((tensor * 2).split(2)))
    return output + 1


def lists_exchanged(tensor: torch.Tensor) -> torch.Tensor:
    outputs = [tensor.new_empty(2) for _ in range(2)]
    dist.all_to_all(outputs, list((tensor * 2).split(2)))
    return outputs[0] + 3 * outputs[1]


def gathered_on_one(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(2)] if dist.get_rank() == 1 else None
    dist.gather(tensor * 2, parts, 1)
    return tensor if parts is None else parts[0] + 3 * parts[1]


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    output = torch.empty_like(tensor)
    dist.scatter(output, [tensor, tensor * 2] if dist.get_rank() == 1 else None, 1)
    return output + 1


def sent(tensor: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 0:
        dist.send(tensor * 2, 1)
        return tensor
    output = torch.empty_like(tensor)
    dist.recv(output, 0)
    return output + 1


def sent_both_ways(tensor: torch.Tensor) -> torch.Tensor:
    output, peer = torch.empty_like(tensor), 1 - dist.get_rank()
    works = [dist.isend(tensor * 2, peer), dist.irecv(output, peer)]
    for work in works:
        work.wait()
    return output + 1


def sent_in_a_batch(tensor: torch.Tensor) -> torch.Tensor:
    output, peer = torch.empty_like(tensor), 1 - dist.get_rank()
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor * 2, peer), dist.P2POp(dist.irecv, output, peer)]
    ):
        work.wait()
    return output + 1


def reduced_together(tensor: torch.Tensor) -> torch.Tensor:
    double, triple = tensor * 2, tensor * 3
    dist.all_reduce_coalesced([double, triple])
    return double + triple


def gathered_together(tensor: torch.Tensor) -> torch.Tensor:
    output = tensor.new_empty(8)
    dist.all_gather_coalesced([output], [tensor * 2])
    return output + 1


def scattered_together(tensor: torch.Tensor) -> torch.Tensor:
    (part,) = dist.reduce_scatter_coalesced([tensor * 2])
    return part + 1  # type: ignore[no-any-return]


def reduced_in_a_block(tensor: torch.Tensor) -> torch.Tensor:
    first, second = tensor * 2, tensor * 3
    with dist.coalescing():
        dist.all_reduce(first)
        dist.all_reduce(second)
    return first + second


def at_a_barrier(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor * 2
    dist.barrier()
    return tensor + 1


def with_objects_of_all(tensor: torch.Tensor) -> torch.Tensor:
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    return tensor + objects[1]["rank"]


def with_an_object_of_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + dist.broadcast_object(dist.get_rank() + 5, 1)


def with_a_reduced_object(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + (dist.reduce_object(3, 0) or 0)


def with_queries(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + dist.get_rank() + dist.get_world_size()


TRACES: dict[str, Function] = {
    "all_reduce recorded": in_place(dist.all_reduce, prof=True),
    "all_reduce under a name": in_place(dist.all_reduce, log_name="mine"),
    "all_reduce": in_place(dist.all_reduce),
    "all_reduce MAX": in_place(dist.all_reduce, "MAX"),
    "all_reduce product": in_place(dist.all_reduce, dist.ReduceOp.PRODUCT),
    "all_reduce torch's min": in_place(dist.all_reduce, c10d.ReduceOp.MIN),
    "all_reduce bfloat16": in_place(dist.all_reduce, dtype=torch.bfloat16),
    "inference_all_reduce": in_place(dist.inference_all_reduce),
    "all_gather_into_tensor": into_another(dist.all_gather_into_tensor, 8),
    "all_gather_into_tensor, other names": by_alias,
    "reduce_scatter_tensor": into_another(dist.reduce_scatter_tensor, 2),
    "all_to_all_single": into_another(dist.all_to_all_single, 4),
    "all_to_all_single with sizes": into_another(dist.all_to_all_single, 4, [2, 2], [2, 2]),
    "all_reduce avg": in_place(dist.all_reduce, "avg"),
    "all_reduce int16": in_place(dist.all_reduce, dtype=torch.int16),
    "all_reduce bool": in_place(dist.all_reduce, dtype=torch.bool),
    "all_reduce timeout": in_place(dist.all_reduce, timeout=30),
    "all_reduce compressed": in_place(dist.all_reduce, compression="bf16"),
    "inference_all_reduce avg": in_place(dist.inference_all_reduce, "avg"),
    "all_gather_into_tensor int16": int16_gathered,
    "reduce_scatter_tensor max": into_another(dist.reduce_scatter_tensor, 2, "max"),
    "reduce_scatter_tensor avg": into_another(dist.reduce_scatter_tensor, 2, "avg"),
    "broadcast": in_place(dist.broadcast, 1),
    "broadcast from a rank of the group": in_place(dist.broadcast, group_src=1),
    "reduce": in_place(dist.reduce, 1),
    "all_gather of lists": list_gathered,
    "reduce_scatter": list_reduced,
    "all_to_all": lists_exchanged,
    "gather": gathered_on_one,
    "scatter": scattered,
    "all_reduce_coalesced": reduced_together,
    "all_gather_coalesced": gathered_together,
    "get_rank and get_world_size": with_queries,
}

NEVER = "{} has no form that torch.compile could put into a graph"
OBJECTS = "{} exchanges Python objects, which cannot be in a graph"
NOT_SO = (
    "{} goes into a graph only without async_op, with a compression by name, on contiguous tensors of one dtype "
    "and device that need no gradient and are not complex, and not within coalescing(); on a GPU only where torch has "
    "the same"
)

#: name -> function, and the call and the reason that the graph breaks with
FALLS_BACK: dict[str, tuple[Function, str, str]] = {
    "all_reduce async": (in_place(dist.all_reduce, async_op=True), "all_reduce", NOT_SO),
    "all_reduce complex": (in_place(dist.all_reduce, dtype=torch.complex64), "all_reduce", NOT_SO),
    "all_reduce_coalesced of a complex one": (reduced_with_a_complex_one, "all_reduce_coalesced", NOT_SO),
    "all_reduce of gaps": (with_gaps, "all_reduce", NOT_SO),
    "all_reduce of an unknown op": (with_an_unknown_op, "all_reduce", NOT_SO),
    "broadcast from a wrong root": (from_a_wrong_root, "broadcast", NOT_SO),
    "all_reduce by a codec": (
        in_place(dist.all_reduce, compression=dist.Compression("bf16", min_size_bytes=0)),
        "all_reduce",
        NOT_SO,
    ),
    "all_gather_into_tensor wrong": (dtypes_mixed_up, "all_gather_into_tensor", NOT_SO),
    "broadcast async": (in_place(dist.broadcast, 1, async_op=True), "broadcast", NOT_SO),
    "all_gather": (one_tensor_gathered, "all_gather", NOT_SO),
    "all_gather async": (asynchronously_gathered, "all_gather", NOT_SO),
    "isend and irecv": (sent_both_ways, "isend", NEVER),
    "batch_isend_irecv": (sent_in_a_batch, "batch_isend_irecv", NEVER),
    "reduce_scatter_coalesced": (scattered_together, "reduce_scatter_coalesced", NEVER),
    "coalescing": (reduced_in_a_block, "coalescing", NEVER),
    "barrier": (at_a_barrier, "barrier", NEVER),
    "all_gather_object": (with_objects_of_all, "all_gather_object", OBJECTS),
    "broadcast_object": (with_an_object_of_one, "broadcast_object", OBJECTS),
    "reduce_object": (with_a_reduced_object, "reduce_object", OBJECTS),
}

#: Falls back as well, for a reason that torch finds, or one that differs between the ranks.
WORKS: dict[str, Function] = {
    "send and recv": sent,
}


def own_tensor() -> torch.Tensor:
    return torch.arange(4.0) + 10 * dist.get_rank() + 1


def run_traced(name: str, backend: str) -> None:
    """``fullgraph`` is what makes a break an error."""
    function = TRACES[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(own_tensor()), function(own_tensor()))


@pytest.mark.parametrize("name", TRACES)
def test_compiled_into_a_graph(pools: Pools, name: str) -> None:
    pools(2).run(run_traced, name, "eager")


@pytest.mark.parametrize("name", ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"])
def test_compiled_into_a_graph_without_mutations(pools: Pools, name: str) -> None:
    pools(2).run(run_traced, name, "aot_eager")


def in_a_group(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    total = tensor * 2
    dist.all_reduce(total, group=group)
    output, part = total.new_empty(8), total.new_empty(4)
    dist.all_gather_into_tensor(output, total + tensor, group)
    dist.reduce_scatter_tensor(part, output, group=group)
    return part + 1


def run_traced_in_groups() -> None:
    """From the import of DTensor on, torch traces with stand-ins for groups."""
    import torch.distributed.tensor

    torch._dynamo.reset()
    compiled: Any = torch.compile(in_a_group, backend="eager", fullgraph=True)
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        assert torch.equal(compiled(own_tensor(), group), in_a_group(own_tensor(), group))
    torch._dynamo.reset()
    dist.set_compression(dist.Compression("bf16", min_size_bytes=0), groups[1])
    try:
        for group in groups:
            assert torch.equal(compiled(own_tensor(), group), in_a_group(own_tensor(), group))
    finally:
        dist.set_compression(None, groups[1])
        for group in groups:
            dist.destroy_process_group(group)


@pytest.mark.skipif(
    not hasattr(torch.distributed.device_mesh, "_register_distributed_opaque_types"),
    reason="this torch traces with the groups themselves",
)
def test_compiled_into_a_graph_with_groups_and_their_settings(pools: Pools) -> None:
    pools(2).run(run_traced_in_groups)


def run_fallen_back(function: Function) -> str:
    """What torch says of the break, where it has to say something."""
    warnings.simplefilter("ignore")  # torch's own, which differ between releases
    expected = function(own_tensor())
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(own_tensor()), expected)
    torch._dynamo.reset()
    try:
        torch.compile(function, backend="eager", fullgraph=True)(own_tensor())
    except RuntimeError as error:
        return str(error)
    return "did not break"


def run_named_fall_back(name: str) -> str:
    return run_fallen_back(FALLS_BACK[name][0])


def run_other_fall_back(name: str) -> str:
    return run_fallen_back(WORKS[name])


@pytest.mark.gloo("the others lack nothing of it")
@pytest.mark.parametrize("name", FALLS_BACK)
def test_compiled_with_a_break_that_says_why(pools: Pools, name: str) -> None:
    _, call, reason = FALLS_BACK[name]
    for said in pools(2).run(run_named_fall_back, name):
        assert f"eager_{call}" in said
        if "reason" in inspect.signature(torch.compiler.disable).parameters:  # not in torch 2.6
            assert reason.format(call) in said


@pytest.mark.parametrize("name", WORKS)
def test_compiled_with_a_break(pools: Pools, name: str) -> None:
    for said in pools(2).run(run_other_fall_back, name):
        assert said != "did not break"


needs_recursive_skips = pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy"), reason="torch 2.6 skips single frames only"
)


def run_ddp_compiled() -> None:
    """DDP's reducer is C++, which calls the methods of the group within what Dynamo evaluates."""
    from torch.nn.parallel import DistributedDataParallel

    def trained(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
        run: Any = DistributedDataParallel(model)
        if compiled:
            run = torch.compile(run, backend="eager")
        for step in range(2):
            inputs, wanted = batch(step)
            torch.nn.functional.mse_loss(run(inputs[own_part()]), wanted[own_part()]).backward()
        return [*model.buffers(), *(parameter.grad for parameter in model.parameters())]

    torch._dynamo.reset()
    for expected, found in zip(trained(False), trained(True), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
@needs_recursive_skips
def test_ddp_compiled(pools: Pools) -> None:
    pools(2).run(run_ddp_compiled)


def torch_broadcast(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor * 2
    c10d.broadcast(tensor, 1)
    return tensor + 1


def torch_reduced_asynchronously(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor * 2
    work = c10d.all_reduce(tensor, async_op=True)
    work.wait()
    return tensor + 1


def torch_sent(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor * 2
    if c10d.get_rank() == 0:
        c10d.send(tensor, 1)
    else:
        c10d.recv(tensor, 0)
    return tensor + 1


def run_calls_of_torch(function: Function) -> None:
    expected = function(own_tensor())
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(own_tensor()), expected)


@needs_recursive_skips
@pytest.mark.parametrize("function", [torch_broadcast, torch_reduced_asynchronously, torch_sent])
def test_calls_of_torch_in_a_compiled_function(pools: Pools, function: Function) -> None:
    pools(2).run(run_calls_of_torch, function)


def run_called_too_early(backend: str) -> None:
    def reduced(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor * 2
        dist.all_reduce(tensor)
        return tensor + 1

    def in_a_block(tensor: torch.Tensor) -> torch.Tensor:
        try:
            print(end="")  # torch gives up a function whose graph breaks within try
            with dist.coalescing():
                dist.all_reduce(tensor)
            dist.all_reduce(tensor, async_op=True).wait()
        finally:
            print(end="")
        return tensor

    torch._dynamo.reset()
    compiled, block = torch.compile(reduced, backend="eager"), torch.compile(in_a_block, backend="eager")
    for _ in range(2):
        with pytest.raises(dist.NotInitializedError):
            compiled(torch.ones(2))
        dist.init_distributed(backend, verbose=False)
        for size in (2, 3):
            assert compiled(torch.ones(size)).tolist() == [2 * dist.get_world_size() + 1] * size
        assert block(torch.ones(2)).tolist() == [dist.get_world_size() ** 2] * 2
        dist.destroy_process_group()


@needs_recursive_skips
def test_compiled_and_called_before_the_set_up(bare_pools: Pools) -> None:
    bare_pools(2).run(run_called_too_early, os.environ.get("TESTS_BACKEND", "gloo"))


def run_with_gradients() -> list[Any]:
    """In place on a tensor that autograd follows: the sum is no part of what it differentiates, compiled or not."""

    def function(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        dist.all_reduce(doubled)
        return (doubled * 3).sum()

    found = []
    for call in (function, torch.compile(function, backend="aot_eager")):
        tensor = own_tensor().requires_grad_()
        loss = call(tensor)
        loss.backward()
        assert tensor.grad is not None
        found.append((loss.item(), tensor.grad.tolist()))
    return found


def test_compiled_with_gradients(pools: Pools) -> None:
    for eager, compiled in pools(2).run(run_with_gradients):
        assert eager == compiled
        assert eager[1] == [6.0] * 4


def run_reductions_of_torch(dtype: torch.dtype) -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    every = [torch.arange(2 * size).add(3 * rank).to(dtype) for rank in range(size)]
    # torch adds no unsigned integers of 16 bits and more.
    total = torch.arange(2 * size).mul(size).add(3 * sum(range(size))).to(dtype)
    c10d.all_reduce(reduced := every[me].clone())
    assert torch.equal(reduced, total)
    c10d.reduce(rooted := every[me].clone(), 0)
    assert torch.equal(rooted, total if me == 0 else every[me])
    c10d.reduce_scatter_tensor(part := torch.empty(2, dtype=dtype), every[me])
    assert torch.equal(part, total[2 * me : 2 * me + 2])


@pytest.mark.parametrize(
    "dtype", [torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128], ids=str
)
def test_torch_reduces_what_the_engine_does_not(pools: Pools, dtype: torch.dtype) -> None:
    if os.environ.get("TESTS_BACKEND", "gloo") == "gloo":
        pytest.skip("torch's own gloo refuses these")
    pools(3).run(run_reductions_of_torch, dtype)
