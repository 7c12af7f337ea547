"""What compression does to training: accuracy of the digits example, by codec.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/compressed_training.py [--write]

Every gradient is averaged over the ranks, compressed, with the batches and epochs of ``docs/examples/digits.py`` and a
quarter of its learning rate, with which one bit an element diverges. Each codec trains from several seeds, which choose
the weights and the batches. The bytes are those that one rank sends; the time is what a link of 1 Gbit/s needs for
them.

``--write`` puts the table into docs/compression.md.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits

import comm_orchestrator as dist

PAGE = Path(__file__).resolve().parent.parent / "docs" / "compression.md"
BEGIN, END = "<!-- begin: benchmarks/compressed_training.py --write -->", "<!-- end of training -->"
METHODS: dict[str, dict[str, Any] | None] = {
    "float32": None,
    "bf16": {"method": "bf16"},
    "fp8": {"method": "fp8"},
    "int8": {"method": "int8"},
    "int4": {"method": "int4"},
    "int4, error feedback": {"method": "int4", "error_feedback": True},
    "onebit": {"method": "onebit"},
    "onebit, blocks of 64": {"method": "onebit", "block_size": 64},
    "topk 10 %": {"method": "topk", "ratio": 0.1},
    "powersgd": {"method": "powersgd", "rank": 4},
}
BITS_PER_S = 1e9


def train(options: dict[str, Any] | None, seed: int, epochs: int, lr: float) -> tuple[float, float, int]:
    """Return accuracy and loss on held-out images, and the bytes that this rank sent."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    held_out = torch.arange(len(images)) % 5 == 0
    train_images, train_labels = images[~held_out], labels[~held_out]
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    shuffle = torch.Generator().manual_seed(seed)
    compression = None if options is None else dist.Compression(**options)
    dist.reset_log()
    for _ in range(epochs):
        order = torch.randperm(len(train_images), generator=shuffle)
        for batch in order[: len(order) // 64 * 64].split(64):
            mine = batch[rank::world_size]
            loss = torch.nn.functional.cross_entropy(model(train_images[mine]), train_labels[mine])
            optimizer.zero_grad()
            loss.backward()
            for name, parameter in model.named_parameters():
                dist.all_reduce(parameter.grad, "avg", compression=compression and compression.of(name))
            optimizer.step()
    share = 2 * (world_size - 1) / world_size  # of an uncompressed all_reduce
    sent = sum(row.calls * (row.wire_bytes if row.method else round(share * row.size_bytes)) for row in dist.log_rows())
    with torch.no_grad():
        output = model(images[held_out])
        loss = torch.nn.functional.cross_entropy(output, labels[held_out])
        accuracy = (output.argmax(1) == labels[held_out]).float().mean()
    return float(accuracy), float(loss), sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="put the table into docs/compression.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_distributed(verbose=False, config={"comms_logger": {"enabled": True}})
    lines = [
        f"| codec | accuracy, mean of {given.seeds} seeds | beside float32 | loss | MiB a rank sent | s at 1 Gbit/s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    plain = 0.0
    for name, options in METHODS.items():
        found = [train(options, seed, given.epochs, given.lr) for seed in range(given.seeds)]
        accuracy, loss, sent = (statistics.mean(one) for one in zip(*found, strict=True))
        plain = plain or accuracy
        lines.append(
            f"| {name} | {accuracy:.2%} | {(accuracy - plain) * 100:+.2f} points | {loss:.3f} | {sent / 2**20:.2f} | "
            f"{sent * 8 / BITS_PER_S:.3f} |"
        )
        if dist.get_rank() == 0:
            print(lines[-1], flush=True)
    if given.write and dist.get_rank() == 0:
        before, rest = PAGE.read_text().split(BEGIN)
        after = rest.split(END, 1)[1]
        PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
