"""Train sharded: every rank has a part of the batch, and of what ZeRO's stages divide.

    torchrun --standalone --nproc-per-node 2 sharded.py --stage 3

Stage 1 divides the optimizer's state, stage 2 also the gradients, stage 3 also the parameters.
"""

from __future__ import annotations

import torch
from language_model import batch, loss_of, run, transformer

import comm_orchestrator as dist


def train(steps: int, stage: int = 1) -> list[float]:
    dist.init_distributed(verbose=False)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = transformer()
    handle = dist.register_sharded_hooks(model, stage)
    optimizer = torch.optim.AdamW(handle.parameter_groups(), lr=3e-3)  # of this rank's part
    handle.attach(optimizer)  # a step brings the parameters of all ranks together
    losses = []
    for step in range(steps):
        text = batch(step).chunk(ranks)[rank]
        loss = loss_of(model(text[:, :-1]), text)
        loss.backward()  # returns when each rank has the averages for its part
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, op="avg")
        losses.append(mean.item())
    handle.remove()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    run(train, stage=(1, 2, 3))
