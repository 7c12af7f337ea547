"""Train in a pipeline of two stages: each rank has half of the layers, and every batch is four micro-batches.

torchrun --standalone --nproc-per-node 2 pipeline.py
"""

from __future__ import annotations

import torch
from language_model import batch, loss_of, run, transformer

import comm_orchestrator as dist

STAGES, MICRO_BATCHES = 2, 4


def train(steps: int) -> list[float]:
    dist.init_distributed(verbose=False)
    schedule = dist.hooks.one_forward_one_backward(STAGES, MICRO_BATCHES)
    embedding, first, second, norm, head = transformer()
    layers = ((embedding, first), (second, norm, head))[dist.get_rank()]
    stage = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        text = batch(step)  # the first stage needs the characters, the last one those to predict
        found = dist.hooks.run_schedule(schedule, stage, text[:, :-1], text, loss_of)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(found).mean() if found else torch.empty(())
        dist.broadcast(mean, src=STAGES - 1)
        losses.append(mean.item())
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    run(train)
