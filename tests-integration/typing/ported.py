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
    if rank == 0:
        dist.all_reduce(tensor, group=group, timeout=5.0)
    print(dist.is_nccl_available(), dist.DistError)  # of torch.distributed, passed on
    print(dist.get_process_group_ranks(None))
    average(torch.nn.Linear(2, 2))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
