"""What the training examples share: a text, a small transformer that predicts its next character, and the options."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

TEXT = torch.frombuffer(bytearray(Path(__file__).with_name("alice.txt").read_bytes()), dtype=torch.uint8).long()
SYMBOLS, CONTEXT, BATCH = 128, 32, 8  # characters of ASCII; of each sequence; sequences a step, over all ranks


class Embedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, width), nn.Embedding(CONTEXT, width)

    def forward(self, text: Tensor) -> Tensor:
        embedded: Tensor = self.symbols(text) + self.places.weight[: text.shape[1]]
        return embedded


class Block(nn.Module):
    """Attention and an MLP; under tensor parallelism, each rank has some of the heads."""

    def __init__(self, width: int, head_width: int, mlp: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.head_width, self.mlp = head_width, mlp(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, hidden: Tensor) -> Tensor:
        normal = self.norm_attention(hidden)
        parts = [layer(normal).unflatten(-1, (-1, self.head_width)) for layer in (self.query, self.key, self.value)]
        query, key, value = (part.transpose(1, 2) for part in parts)  # (sequences, heads, characters, head_width)
        heads = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(heads.transpose(1, 2).flatten(2))
        added: Tensor = hidden + self.mlp(self.norm_mlp(hidden))
        return added


def dense(width: int) -> nn.Module:
    return nn.Sequential(OrderedDict(up=nn.Linear(width, 4 * width), act=nn.GELU(), down=nn.Linear(4 * width, width)))


class Experts(nn.Module):
    """Several MLPs; a router sends each character through the one that it prefers."""

    def __init__(self, width: int, number: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, number, bias=False)
        self.experts = nn.ModuleList(dense(width) for _ in range(number))

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).max(-1, keepdim=True)
        return self.process(rows, chosen, weights).view_as(hidden)

    def process(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return what the chosen expert makes of each row, times its weight; all are (rows, ...)."""
        outputs = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (places,) = (chosen == number).any(1).nonzero(as_tuple=True)
            outputs = outputs.index_copy(0, places, expert(rows[places]))
        return outputs * weights


def transformer(layers: int = 2, width: int = 32, mlp: Callable[[int], nn.Module] = dense) -> nn.Sequential:
    """Return a model of (n, CONTEXT) characters to (n, CONTEXT, SYMBOLS) logits, the same on every rank."""
    torch.manual_seed(0)
    blocks = [(f"block{number}", Block(width, max(8, width // 8), mlp)) for number in range(layers)]
    ends = [("norm", nn.LayerNorm(width)), ("head", nn.Linear(width, SYMBOLS))]
    return nn.Sequential(OrderedDict[str, nn.Module]([("embedding", Embedding(width)), *blocks, *ends]))


def batch(step: int, size: int = BATCH) -> Tensor:
    """Return the sequences of a step, (size, CONTEXT + 1), the same on every rank."""
    starts = torch.randint(len(TEXT) - CONTEXT, (size, 1), generator=torch.Generator().manual_seed(step))
    return TEXT[starts + torch.arange(CONTEXT + 1)]


def loss_of(logits: Tensor, text: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def run(train: Callable[..., list[float]], **choices: tuple[int, ...]) -> None:
    """Train as the options ask, and print the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    for name, values in choices.items():
        parser.add_argument(f"--{name}", type=int, choices=values, default=values[0])
    for step, loss in enumerate(train(**vars(parser.parse_args()))):
        if step % 20 == 19:
            print(f"step {step + 1}: loss {loss:.4f}")
