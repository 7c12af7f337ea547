"""Train tensor-parallel: every rank has the whole batch, and a part of each large matrix.

torchrun --standalone --nproc-per-node 2 tensor_parallel.py
"""

from __future__ import annotations

import torch
from language_model import batch, run, transformer

import comm_orchestrator as dist

# Attention heads and the inner features of MLPs are divided; so are the characters of the embedding and the head.
PLAN = {
    "embedding.symbols": "vocabulary",
    "block*.query": "column",
    "block*.key": "column",
    "block*.value": "column",
    "block*.output": "row",
    "block*.mlp.up": "column",
    "block*.mlp.down": "row",
    "head": "vocabulary",
}


def train(steps: int) -> list[float]:
    dist.init_distributed(verbose=False)
    model = transformer()
    handle = dist.register_model_parallel_hooks(model, plan=PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        text = batch(step)
        logits = model(text[:, :-1])  # of this rank's characters
        loss = dist.hooks.vocabulary_parallel_cross_entropy(logits, text[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # the same on every rank
    handle.remove()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    run(train)
