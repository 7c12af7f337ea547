"""Train in two tensor-parallel groups of two ranks; each group has a part of the batch.

torchrun --standalone --nproc-per-node 4 data_tensor.py
"""

from __future__ import annotations

import torch
from language_model import batch, loss_of, run, transformer

import comm_orchestrator as dist

PLAN = {
    "block*.query": "column",
    "block*.key": "column",
    "block*.value": "column",
    "block*.output": "row",
    "block*.mlp.up": "column",
    "block*.mlp.down": "row",
    "head": "column_gathered",  # every rank has all logits, and the usual loss
}


def train(steps: int) -> list[float]:
    dist.init_distributed(verbose=False)
    groups = dist.hooks.ParallelGroups.from_sizes(data=2, tensor=2)
    model = transformer()
    tensor = dist.register_model_parallel_hooks(model, groups, PLAN)
    data = dist.register_data_parallel_hooks(model, group=groups.data.group)  # of this rank's part of the model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        text = batch(step).chunk(groups.data.size)[groups.data.rank]
        loss = loss_of(model(text[:, :-1]), text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, op="avg", group=groups.data.group)
        losses.append(mean.item())
    data.remove()
    tensor.remove()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    run(train)
