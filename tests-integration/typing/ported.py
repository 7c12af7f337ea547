"""A training program written for torch.distributed, ported by its import: mypy, strict, accepts all of it."""

from __future__ import annotations

import torch

import comm_orchestrator as dist


def average(model: torch.nn.Module) -> None:
    size = dist.get_world_size()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= size


def main() -> None:
    dist.init_distributed(verbose=False, dist_backend="gloo")
    rank: int = dist.get_rank()
    group = dist.new_group([0])
    tensor = torch.ones(4)
    dist.broadcast(tensor, src=0)
    parts = [torch.empty(4) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    if rank == 0:
        dist.all_reduce(tensor, group=group, timeout=5.0)
    store: type[dist.FileStore] = dist.FileStore  # of torch.distributed, handed on
    print(store, dist.get_process_group_ranks(None))
    average(torch.nn.Linear(2, 2))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
