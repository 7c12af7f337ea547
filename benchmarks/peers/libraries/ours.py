"""This project, through its public API; with oneCCL doing the work where the environment says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comm_orchestrator as dist
from comm_backend_ccl import provider
from peers.data import Unsupported
from peers.libraries import torch_like

__all__ = ["Library"]


class Library:
    def __init__(self, rank: int, ranks: int, meet: Callable[[], None]) -> None:
        dist.init_distributed("ccl", verbose=False)
        if dist.get_backend() != "ccl":
            raise SystemExit(f"got backend {dist.get_backend()}, expected ccl")
        self.facts = dict(provider.availability()["ccl"].details)
        self.reduce: Callable[[Any], object] = dist.inference_all_reduce

    def empty(self, elements: int, dtype: Any, way: str) -> Any:
        if way != "shared":
            return None
        make = getattr(dist, "empty_shared", None)
        if make is None:
            raise Unsupported("there is no empty_shared")
        return make((elements,), dtype)

    def call(self, task: Any, source: Any, target: Any) -> tuple[Callable[..., object], tuple[Any, ...]]:
        name = "inference_all_reduce" if task.way == "inference" else task.operation
        return getattr(dist, name), torch_like.arguments(task, source, target)

    def close(self) -> None:
        dist.destroy_process_group()
