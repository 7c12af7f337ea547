"""Train data-parallel with torch's DistributedDataParallel, on the group that comm_orchestrator has set up.

torchrun --standalone --nproc-per-node 2 ddp.py
"""

from __future__ import annotations

import torch
from language_model import batch, loss_of, run, transformer
from torch.nn.parallel import DistributedDataParallel

import comm_orchestrator as dist


def train(steps: int) -> list[float]:
    dist.init_distributed(verbose=False)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        text = batch(step).chunk(ranks)[rank]
        loss = loss_of(model(text[:, :-1]), text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, op="avg")
        losses.append(mean.item())
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    run(train)
