"""Train a small language model with ZeRO-3, plain and as ZeRO++: weights gathered in int8, gradients reduced in int4.

LOCAL_SIZE=1 torchrun --nproc-per-node 2 zeropp_training.py replaced OUT_FOLDER

DeepSpeed reduces in int4 between hosts alone; ``LOCAL_SIZE`` tells it how many ranks a host has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed_training import BATCH, Model, batch, deepspeed, dist

STEPS = 12
KINDS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {},
    "int8 weights": {"zero_quantized_weights": True},
    "int4 gradients": {"zero_quantized_gradients": True},
    "both": {"zero_quantized_weights": True, "zero_quantized_gradients": True},
}


def train(options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    config = {
        "train_batch_size": BATCH * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": BATCH,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **options},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    losses = []
    dist.reset_log()
    for step in range(STEPS):
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    rows = dist.log_rows()
    return {
        "losses": losses,
        "int4 calls": sum(row.calls for row in rows if row.method.startswith("int4")),
        "gathered bytes": sum(row.calls * row.size_bytes for row in rows if row.operation.startswith("all_gather")),
    }


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    dist.configure(enabled=True)
    found = {name: train(options) for name, options in KINDS.items()}
    Path(sys.argv[2], f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
