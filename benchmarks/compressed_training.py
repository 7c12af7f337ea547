"""What compression does to training, by codec: accuracy of the digits example, and loss of a transformer on text.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/compressed_training.py [--write] [--plot]

Every gradient is averaged over the ranks, compressed. The digits have the batches and epochs of
``docs/examples/digits.py`` and half of its learning rate, with which one bit an element diverges. The transformer (two
layers, 117 thousand parameters) predicts the next character of this project's documentation; its last tenth is held
out. Learning rates fall linearly to zero. Each codec trains from several seeds, which choose the weights and the
batches. The bytes are those that one rank sends; the time is computed: what a link of 1 Gbit/s needs for them.

``later`` leaves the first quarter of the steps uncompressed, in which Adam's second moments form, as Tang et al.,
"1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML 2021, do, and as torch's
hook for PowerSGD does.

``--write`` puts the tables into docs/compression.md, and which codecs are more than half a point of accuracy or 2 % of
the loss away from float32; ``--plot`` draws docs/compression-loss.svg.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from measuring import put_between
from plots import plot_losses

import comm_orchestrator as dist

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, PICTURE = DOCS / "compression.md", DOCS / "compression-loss.svg"
BEGIN, END = "<!-- begin: benchmarks/compressed_training.py --write -->", "<!-- end of training -->"
METHODS: dict[str, dict[str, Any] | None] = {
    "float32": None,
    "bf16": {"method": "bf16"},
    "fp8": {"method": "fp8"},
    "int8": {"method": "int8"},
    "int4": {"method": "int4"},
    "int4, error feedback": {"method": "int4", "error_feedback": True},
    "onebit": {"method": "onebit"},
    "onebit, later": {"method": "onebit"},
    "topk 10 %": {"method": "topk", "ratio": 0.1},
    "powersgd": {"method": "powersgd", "rank": 4},
    "powersgd, later": {"method": "powersgd", "rank": 4},
}
BITS_PER_S = 1e9
#: How far from float32 a codec may be: points of accuracy, and the share of the loss.
MOST_POINTS, MOST_LOSS = 0.5, 0.02
#: The share of the steps that ``later`` leaves uncompressed.
UNCOMPRESSED = 0.25
COMPUTED = "The seconds at 1 Gbit/s are computed from the bytes."


CONTEXT, BATCH, WIDTH = 64, 16, 64


def sent_bytes() -> int:
    """Return what this rank has sent since the log was reset."""
    share = 2 * (dist.get_world_size() - 1) / dist.get_world_size()  # of an uncompressed all_reduce
    return sum(row.calls * (row.wire_bytes if row.method else round(share * row.size_bytes)) for row in dist.log_rows())


class Training:
    """One training: whether a step is compressed, and its learning rate, which falls to zero."""

    def __init__(self, optimizer: torch.optim.Optimizer, codec: str, steps: int) -> None:
        options, later = METHODS[codec], codec.endswith("later")
        self._compression = None if options is None else dist.Compression(**options)
        self._first_compressed = int(UNCOMPRESSED * steps) if later else 0
        self._optimizer, self._step = optimizer, 0
        self._decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)

    def step(self, model: torch.nn.Module) -> None:
        """Average the gradients over all ranks, and use them."""
        reduce_gradients(model, self._compression if self._step >= self._first_compressed else None)
        self._optimizer.step()
        self._decay.step()
        self._step += 1


def reduce_gradients(model: torch.nn.Module, compression: dist.Compression | None) -> None:
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad, "avg", compression=compression and compression.of(name))


def train_digits(codec: str, seed: int, epochs: int, lr: float) -> tuple[float, float, int]:
    """Return accuracy and loss on held-out images, and the bytes that this rank sent."""
    from sklearn.datasets import load_digits

    rank, world_size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    held_out = torch.arange(len(images)) % 5 == 0
    train_images, train_labels = images[~held_out], labels[~held_out]
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    shuffle = torch.Generator().manual_seed(seed)
    training = Training(optimizer, codec, epochs * (len(train_images) // 64))
    dist.reset_log()
    for _ in range(epochs):
        order = torch.randperm(len(train_images), generator=shuffle)
        for batch in order[: len(order) // 64 * 64].split(64):
            mine = batch[rank::world_size]
            loss = torch.nn.functional.cross_entropy(model(train_images[mine]), train_labels[mine])
            optimizer.zero_grad()
            loss.backward()
            training.step(model)
    sent = sent_bytes()
    with torch.no_grad():
        output = model(images[held_out])
        loss = torch.nn.functional.cross_entropy(output, labels[held_out])
        accuracy = (output.argmax(1) == labels[held_out]).float().mean()
    return float(accuracy), float(loss), sent


class Transformer(torch.nn.Module):
    """A causal language model of characters."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.symbols = torch.nn.Embedding(symbols, WIDTH)
        self.places = torch.nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = torch.nn.Linear(WIDTH, symbols)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the loss of each character after the first of ``text``, (n, CONTEXT + 1)."""
        hidden = self.layers(self.symbols(text[:, :-1]) + self.places, mask=self.mask, is_causal=True)
        return torch.nn.functional.cross_entropy(self.output(hidden).flatten(0, 1), text[:, 1:].flatten())


def documentation() -> tuple[torch.Tensor, int]:
    """Return the text of this project's pages as numbers of characters, and how many characters there are."""
    text = "".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text]), len(numbers)


def train_transformer(codec: str, seed: int, steps: int, lr: float) -> tuple[float, int]:
    """Return the loss on held-out text, and the bytes that this rank sent."""
    text, symbols = documentation()
    known, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    torch.manual_seed(seed)
    model = Transformer(symbols)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    training = Training(optimizer, codec, steps)
    windows = torch.arange(CONTEXT + 1)
    # Another part of each batch on every rank.
    random = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    dist.reset_log()
    for _ in range(steps):
        begins = torch.randint(len(known) - CONTEXT, (BATCH, 1), generator=random)
        optimizer.zero_grad()
        model(known[begins + windows]).backward()
        training.step(model)
    sent = sent_bytes()
    with torch.no_grad():
        rows = held_out[: len(held_out) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
        loss = float(model(rows[:: max(1, len(rows) // 256)]))
    return loss, sent


def digits_table(given: argparse.Namespace) -> list[str]:
    lines = [
        f"| codec | accuracy, mean of {given.seeds} seeds | beside float32 | loss | MiB a rank sent | s at 1 Gbit/s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    plain, behind = 0.0, []
    for name in METHODS:
        found = [train_digits(name, seed, given.epochs, given.lr) for seed in range(given.seeds)]
        accuracy, loss, sent = (statistics.mean(one) for one in zip(*found, strict=True))
        plain = plain or accuracy
        points = (accuracy - plain) * 100
        behind += [f"`{name}` ({points:+.2f})"] if points < -MOST_POINTS else []
        lines.append(
            f"| {name} | {accuracy:.2%} | {points:+.2f} points | {loss:.3f} | {sent / 2**20:.2f} | "
            f"{sent * 8 / BITS_PER_S:.3f} |"
        )
        show(lines[-1])
    missed = f"All codecs but {', '.join(behind)}" if behind else "All codecs"
    return [*lines, "", f"{missed} are within {MOST_POINTS} points of float32's accuracy. {COMPUTED}"]


def transformer_table(given: argparse.Namespace) -> tuple[list[str], list[tuple[str, float, float]]]:
    """Return the table with what it says, and the name, MiB sent and loss of each codec."""
    lines = [
        f"| codec | loss, mean of {given.seeds} seeds | beside float32 | MiB a rank sent | s at 1 Gbit/s |",
        "|---|---:|---:|---:|---:|",
    ]
    plain, rows = 0.0, []
    for name in METHODS:
        found = [train_transformer(name, seed, given.steps, given.adam_lr) for seed in range(given.seeds)]
        loss, sent = (statistics.mean(one) for one in zip(*found, strict=True))
        plain = plain or loss
        rows.append((name, sent / 2**20, loss))
        lines.append(
            f"| {name} | {loss:.3f} | {loss / plain - 1:+.1%} | {sent / 2**20:.2f} | {sent * 8 / BITS_PER_S:.3f} |"
        )
        show(lines[-1])
    return [*lines, "", *describe_losses({name: loss for name, _, loss in rows}, given.steps)], rows


def describe_losses(losses: Mapping[str, float], steps: int) -> list[str]:
    """Return which codecs have a loss that is too far above float32's, which of them ``later`` helps, and its price.

    Args:
        losses: by codec, float32's among them.
        steps: of the training.
    """
    above = {name: loss / losses["float32"] - 1 for name, loss in losses.items()}
    missing = [name for name, share in above.items() if share > MOST_LOSS]
    if not missing:
        lines = [f"All codecs are within {MOST_LOSS:.0%} of float32's loss."]
    else:
        named = ", ".join(f"`{name}` ({above[name]:+.2%})" for name in missing)
        lines = [f"More than {MOST_LOSS:.0%} above float32's loss: {named}."]
        helped = [f"`{one}`" for name in missing if above.get(one := f"{name}, later", MOST_LOSS + 1) <= MOST_LOSS]
        if helped:
            begun = f"{int(UNCOMPRESSED * steps)} of {steps} steps"
            lines.append(f"Of these, only {' and '.join(helped)} are within it, which leave {begun} uncompressed.")
    return [*lines, COMPUTED]


def show(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15, help="of the digits")
    parser.add_argument("--lr", type=float, default=0.1, help="of the digits")
    parser.add_argument("--steps", type=int, default=400, help="of the transformer")
    parser.add_argument("--adam-lr", type=float, default=4e-3, help="of the transformer")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/compression.md")
    parser.add_argument("--plot", action="store_true", help="draw docs/compression-loss.svg")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_distributed(verbose=False, config={"comms_logger": {"enabled": True}})
    digits, (transformer, rows) = digits_table(given), transformer_table(given)
    lines = [
        *("The digits:", "", *digits, ""),
        *(f"The transformer, after {given.steps} steps of Adam:", "", *transformer),
    ]
    if given.plot and dist.get_rank() == 0:
        plot_losses(PICTURE, rows, f"Loss of the transformer after {given.steps} steps, mean of {given.seeds} seeds")
    if given.write and dist.get_rank() == 0:
        put_between(PAGE, BEGIN, END, lambda _: "\n".join(lines) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
