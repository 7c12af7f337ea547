"""Train in one process, without communication: the reference of the other examples.

python plain.py [--experts 4]
"""

from __future__ import annotations

import functools

import torch
from language_model import Experts, batch, dense, loss_of, run, transformer


def train(steps: int, experts: int = 0) -> list[float]:
    model = transformer(mlp=functools.partial(Experts, number=experts) if experts else dense)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        text = batch(step)
        loss = loss_of(model(text[:, :-1]), text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    run(train, experts=(0, 4))
