"""Train a small language model with DeepSpeed's 1-bit optimizers, and write down every loss.

torchrun --nproc-per-node 2 onebit_training.py replaced|replaced-ccl|replaced-own OUT_FOLDER [STEPS [OPTIMIZER ...]]

``replaced-own`` keeps DeepSpeed's own ``CompressedBackend``. By itself it does not run on CPUs: it packs bits with an
operator that DeepSpeed compiles for XPU alone, and gloo refuses its ``all_gather`` of a scale without dimensions into
tensors with one. Here two functions of NumPy pack the bits, and the collectives are those of this API.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

OWN = sys.argv[1] == "replaced-own"

from deepspeed_training import BATCH, TEXT, Model, batch, deepspeed, dist  # noqa: E402

#: of the steps without compression
WARM_UP = 1 / 4
LR = 3e-3
# One bit cannot say 0: momenta of symbols that the warm-up has not seen would grow without end. So the text has few
# symbols, its most frequent bytes and one for all others.
SYMBOLS = 16
FREQUENT = torch.bincount(torch.tensor(list(TEXT)), minlength=256).topk(SYMBOLS - 1).indices
CLASSES = torch.full((256,), SYMBOLS - 1).index_put((FREQUENT,), torch.arange(SYMBOLS - 1))


class Packbits:
    """What DeepSpeed's operator of this name does, for CPU tensors."""

    def load(self) -> Packbits:
        return self

    def packbits(self, tensor: torch.Tensor, count: int, rank: int) -> torch.Tensor:
        return torch.from_numpy(np.packbits(tensor.numpy() >= 0))

    def unpackbits(self, tensor: torch.Tensor, count: int, rank: int) -> torch.Tensor:
        return torch.from_numpy(np.unpackbits(tensor.numpy())).float() * 2 - 1


def keep_own_transport() -> None:
    """Import DeepSpeed's own module in the place of that of ``replace_comm()``."""
    import deepspeed.ops.op_builder as builders

    builders.PackbitsBuilder = Packbits
    name = "deepspeed.runtime.comm.compressed"
    file = Path(deepspeed.__path__[0], "runtime", "comm", "compressed.py")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def optimizers(steps: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return types of DeepSpeed's configuration with their parameters; each imports the transport of another name."""
    frozen = {"lr": LR, "freeze_step": round(steps * WARM_UP)}

    def over(name: str) -> dict[str, str]:
        return {"comm_backend_name": "compressed" if OWN else name}

    return {
        "Adam": ("Adam", {"lr": LR, "torch_adam": True}),
        "OnebitAdam": ("OneBitAdam", {**frozen, **over("nccl")}),
        "OnebitLamb": ("OneBitLamb", {**frozen, "lr": 4 * LR, **over("mpi")}),
        "ZeroOneAdam": ("ZeroOneAdam", {"lr": LR / 3, "var_freeze_step": steps // 2, **over("compressed")}),
    }


def train(name: str, steps: int) -> dict[str, Any]:
    """Return the losses of all ranks' batches before each step, and what carried the compressed ones."""
    torch.manual_seed(0)
    kind, parameters = optimizers(steps)[name]
    config = {
        "train_batch_size": BATCH * dist.get_world_size(),
        "train_micro_batch_size_per_gpu": BATCH,
        "steps_per_print": 10**9,
        "optimizer": {"type": kind, "params": parameters},
    }
    model = Model(SYMBOLS)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    handle = getattr(engine.optimizer, "comm_backend_handle", None)
    losses = []
    dist.reset_log()
    for step in range(steps):
        loss = engine(CLASSES[batch(step)])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    engine.destroy()
    compressed = sum(row.calls for row in dist.log_rows() if row.method.startswith("onebit"))
    return {
        "losses": losses,
        "compressed": compressed,
        "transport": f"{type(handle).__module__}.{type(handle).__name__}",
    }


def main() -> None:
    out, steps = Path(sys.argv[2]), int((*sys.argv[3:], "40")[0])
    names = sys.argv[4:] or ["Adam", "OnebitAdam", "OnebitLamb", "ZeroOneAdam"]
    if OWN:
        keep_own_transport()
    torch.set_num_threads(1)
    deepspeed.init_distributed("ccl" if sys.argv[1].endswith("ccl") else "gloo", verbose=False)
    dist.configure(enabled=True)
    found = {name: train(name, steps) for name in names}
    imported = [name for name in ("cupy", "mpi4py") if name in sys.modules]
    told = {"backend": torch.distributed.get_backend(), "imported": imported, "optimizers": found}
    Path(out, f"rank{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
