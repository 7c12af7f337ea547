"""A tensor- and data-parallel step as Megatron-LM's code writes it, against names of ``torch.distributed`` alone.

``test_megatron_style.py`` runs it with the import line as it is, and with ``import torch.distributed as dist``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

import comm_orchestrator as dist

TENSOR: Any = None
DATA: Any = None


def initialize_model_parallel(tensor_model_parallel_size: int) -> None:
    global TENSOR, DATA
    world_size, rank = dist.get_world_size(), dist.get_rank()
    assert world_size % tensor_model_parallel_size == 0
    for first in range(0, world_size, tensor_model_parallel_size):
        ranks = list(range(first, first + tensor_model_parallel_size))
        group = dist.new_group(ranks)
        if rank in ranks:
            TENSOR = group
    for first in range(tensor_model_parallel_size):
        ranks = list(range(first, world_size, tensor_model_parallel_size))
        group = dist.new_group(ranks)
        if rank in ranks:
            DATA = group


class CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=TENSOR)
        return gradient


class ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=TENSOR)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def own_part(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    size, rank = dist.get_world_size(group=TENSOR), dist.get_rank(group=TENSOR)
    return torch.split(tensor, tensor.shape[dim] // size, dim)[rank].contiguous()


class ColumnParallelLinear(nn.Module):
    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(own_part(whole, 0))

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return F.linear(CopyToRegion.apply(tensor), self.weight)


class RowParallelLinear(nn.Module):
    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(own_part(whole, 1))
        self.bias = nn.Parameter(torch.zeros(whole.shape[0], dtype=whole.dtype))

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return ReduceFromRegion.apply(F.linear(tensor, self.weight)) + self.bias


def broadcast_data(keys: list[str], data: dict[str, torch.Tensor] | None, datatype: torch.dtype) -> dict[str, Any]:
    src = dist.get_global_rank(TENSOR, 0)
    sizes = torch.zeros(len(keys) * 4, dtype=torch.int64)
    if dist.get_rank(group=TENSOR) == 0:
        assert data is not None
        for place, key in enumerate(keys):
            sizes[place * 4 : place * 4 + data[key].dim()] = torch.tensor(data[key].shape)
    dist.broadcast(sizes, src, group=TENSOR)
    shapes = [[n for n in sizes[place * 4 : place * 4 + 4].tolist() if n] for place in range(len(keys))]
    numels = [torch.Size(shape).numel() for shape in shapes]
    if dist.get_rank(group=TENSOR) == 0:
        assert data is not None
        flat = torch.cat([data[key].contiguous().view(-1) for key in keys])
    else:
        flat = torch.empty(sum(numels), dtype=datatype)
    dist.broadcast(flat, src, group=TENSOR)
    parts = flat.split(numels)
    return {key: part.view(shape) for key, part, shape in zip(keys, parts, shapes, strict=True)}


def allreduce_gradients(model: nn.Module, bucket_elements: int) -> None:
    buckets: list[list[torch.Tensor]] = [[]]
    for parameter in model.parameters():
        assert parameter.grad is not None
        if sum(one.numel() for one in buckets[-1]) > bucket_elements:
            buckets.append([])
        buckets[-1].append(parameter.grad)
    for bucket in buckets:
        coalesced = _flatten_dense_tensors(bucket)
        coalesced /= dist.get_world_size(group=DATA)
        work = dist.all_reduce(coalesced, op=dist.ReduceOp.SUM, group=DATA, async_op=True)
        work.wait()
        for gradient, synced in zip(bucket, _unflatten_dense_tensors(coalesced, bucket), strict=True):
            gradient.copy_(synced)


def train(tensor_model_parallel_size: int) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses of three steps and the whole weights behind them."""
    initialize_model_parallel(tensor_model_parallel_size)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) / 4 for shape in ((16, 8), (8, 16))]
    model = nn.Sequential(ColumnParallelLinear(weights[0]), nn.GELU(), RowParallelLinear(weights[1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        data = None
        if dist.get_rank(group=TENSOR) == 0:
            whole = torch.randn(8, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            mine = whole.chunk(dist.get_world_size(group=DATA))[dist.get_rank(group=DATA)]
            data = {"input": mine, "target": mine.roll(1, 1)}
        batch = broadcast_data(["input", "target"], data, torch.float64)
        loss = F.mse_loss(model(batch["input"]), batch["target"])
        optimizer.zero_grad()
        loss.backward()
        allreduce_gradients(model, 100)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=DATA)
        losses.append(mean.item() / dist.get_world_size(group=DATA))
    gathered = []
    for parameter, dim in ((model[0].weight, 0), (model[2].weight, 1)):
        parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size(group=TENSOR))]
        dist.all_gather(parts, parameter.detach(), group=TENSOR)
        gathered.append(torch.cat(parts, dim))
    dist.barrier()
    return losses, gathered
