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


def overlap(buckets: list[torch.Tensor]) -> None:
    works = [dist.all_reduce(bucket, dist.ReduceOp.AVG, async_op=True) for bucket in buckets]
    for work in works:
        work.wait()
    dist.broadcast(buckets[0], 0, None, True).wait()
    gathered = [torch.empty_like(buckets[0]) for _ in range(dist.get_world_size())]
    work = dist.all_gather(gathered, buckets[0], async_op=True)
    while not work.is_completed():
        pass
    total = sum(part.sum().item() for part in dist.all_gather(buckets[0]))
    dist.barrier(async_op=True).wait(timeout=5.0)
    handles: list[dist.Work] = [dist.send(buckets[0], 1, async_op=True), dist.recv(buckets[0], 1, async_op=True)]
    source: int = dist.recv(buckets[0])
    parts: list[torch.Tensor] = dist.reduce_scatter_coalesced(buckets)
    print(total, handles, source, parts)


def pass_on(tensor: torch.Tensor, async_op: bool) -> dist.Work | None:
    return dist.reduce_scatter_tensor(tensor[:1], tensor, "Sum", None, async_op)


def split() -> dist.ProcessGroup | None:
    group = dist.new_group([0, 1], backend="gloo")
    if group == dist.GroupMember.NON_GROUP_MEMBER or group is dist.NON_GROUP_MEMBER:
        return None
    own, all_groups = dist.new_subgroups(2)
    dist.all_reduce(torch.ones(1), torch.distributed.ReduceOp.MAX, own)
    dist.all_reduce(torch.ones(1), group=all_groups[0])
    print(group.size(), dist.reduce_object(1, 0, "max"), dist.reduce_object([1], 0, lambda a, b: a + b))
    return group


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
    overlap([tensor])
    pass_on(tensor, True)
    split()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
