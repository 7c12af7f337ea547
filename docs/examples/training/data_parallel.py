"""Train data-parallel: every rank has the whole model and a part of the batch; hooks average the gradients.

torchrun --standalone --nproc-per-node 2 data_parallel.py
"""

from __future__ import annotations

import torch
from language_model import batch, loss_of, run, transformer

import comm_orchestrator as dist


def train(steps: int) -> list[float]:
    dist.init_distributed(verbose=False)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = transformer()
    handle = dist.register_data_parallel_hooks(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        text = batch(step).chunk(ranks)[rank]
        loss = loss_of(model(text[:, :-1]), text)
        loss.backward()  # returns when the gradients are averaged
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, op="avg")
        losses.append(mean.item())
    handle.remove()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    run(train)
