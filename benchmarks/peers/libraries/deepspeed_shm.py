"""DeepSpeed's operator for ``inference_all_reduce`` through shared memory, which its ``TorchBackend`` loads on CPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder import ShareMemCommBuilder

from peers.data import Unsupported

__all__ = ["Library"]

# The operator counts bytes in an int.
LIMIT_BYTES = 2**31


class Library:
    def __init__(self, rank: int, ranks: int, meet: Callable[[], None]) -> None:
        builder: Any = ShareMemCommBuilder()
        self.facts = {"deepspeed": version("deepspeed")}
        # It is compiled once, by one rank; what an earlier one that was ended has locked would stay so.
        if rank == 0:
            lock = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / builder.name / "lock"
            lock.unlink(missing_ok=True)
            library = builder.load(verbose=False)
        meet()
        if rank:
            library = builder.load(verbose=False)
        library.initialize(ranks, rank)
        # Each rank takes what it finds under the others' names, which need not have been set up yet.
        meet()

    def empty(self, elements: int, dtype: Any, way: str) -> Any:
        return None

    def call(self, task: Any, source: Any, target: Any) -> tuple[Callable[..., object], tuple[Any, ...]]:
        if task.operation != "all_reduce":
            raise Unsupported(f"the operator does all_reduce only, no {task.operation}")
        if task.size_bytes >= LIMIT_BYTES:
            raise Unsupported("the operator takes less than 2 GiB")
        operator = torch.ops.deepspeed.inference_all_reduce_.default
        return operator, (source,)

    def close(self) -> None:
        """Nothing: the operator has no end, and its shared memory is removed by who started it."""
