"""Train a small language model with DeepSpeed's ZeRO stages, and write down every loss to its last bit.

torchrun --nproc-per-node 2 deepspeed_training.py stock|replaced|replaced-ccl OUT_FOLDER [STAGE ...]

Without a stage, 0 to 3 are run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

if sys.argv[1].startswith("replaced"):
    import comm_orchestrator.deepspeed

    comm_orchestrator.deepspeed.replace_comm()

import deepspeed
from deepspeed import comm as dist

TEXT = Path(__file__).parents[2].joinpath("LICENSE").read_bytes()
LENGTH, BATCH, STEPS = 32, 8, 6
STAGES = ("0", "1", "2", "3")


class Model(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, symbols: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, 32)
        self.place = nn.Parameter(torch.zeros(LENGTH, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, symbols)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.encoder(self.embed(text) + self.place, mask=mask, is_causal=True)
        loss: torch.Tensor = nn.functional.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        return loss


def engine_for(stage: str) -> Any:
    torch.manual_seed(0)
    model = Model()
    config = {
        "train_batch_size": BATCH * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": int(stage), "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    starts = torch.randint(0, len(TEXT) - LENGTH, (BATCH,), generator=generator).tolist()
    return torch.tensor([list(TEXT[start : start + LENGTH]) for start in starts])


def train(engine: Any, steps: range) -> list[str]:
    losses = []
    for step in steps:
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    return losses


def main() -> None:
    out = Path(sys.argv[2])
    deepspeed.init_distributed("ccl" if sys.argv[1].endswith("ccl") else "gloo", verbose=False)
    found = {}
    for stage in sys.argv[3:] or STAGES:
        folder = out / f"checkpoint-{stage}"
        engine = engine_for(stage)
        losses = train(engine, range(STEPS // 2))
        engine.save_checkpoint(str(folder), tag="half")
        losses += train(engine, range(STEPS // 2, STEPS))
        engine.destroy()
        engine = engine_for(stage)
        engine.load_checkpoint(str(folder), tag="half")
        resumed = train(engine, range(STEPS // 2, STEPS))
        engine.destroy()
        found[stage] = {"losses": losses, "resumed": resumed}
    module = dist.all_reduce.__module__
    told = {"module": module, "backend": torch.distributed.get_backend(), "stages": found}
    Path(out, f"rank{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
