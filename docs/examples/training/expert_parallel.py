"""Train expert-parallel: every rank has a part of the batch and half of the experts; rows travel to their experts.

torchrun --standalone --nproc-per-node 2 expert_parallel.py
"""

from __future__ import annotations

import torch
from language_model import Experts, batch, loss_of, run, transformer
from torch import Tensor

import comm_orchestrator as dist


class ParallelExperts(Experts):
    """Some of the experts of each layer, which compute for the rows of all ranks."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        own = len(self.experts) // dist.get_world_size()
        self.experts = self.experts[dist.get_rank() * own : (dist.get_rank() + 1) * own]

    def process(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        arrived = dist.hooks.dispatch_to_experts(rows, chosen, self.router.out_features)
        outputs = [expert(own) for expert, own in zip(self.experts, arrived.per_expert(), strict=True)]
        return arrived.combine(torch.cat(outputs), weights)


def train(steps: int) -> list[float]:
    dist.init_distributed(verbose=False)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = transformer(mlp=ParallelExperts)
    of_experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    handle = dist.register_data_parallel_hooks(model, ignored_parameters=of_experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        text = batch(step).chunk(ranks)[rank]
        loss = loss_of(model(text[:, :-1]), text)
        loss.backward()
        for parameter in of_experts:  # gradients of all ranks' losses have arrived: the average is of as many
            parameter.grad.div_(ranks)
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
