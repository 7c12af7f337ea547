"""gloo, as ``torch.distributed`` calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from peers.data import Unsupported
from peers.libraries import torch_like

__all__ = ["Library"]


class Library:
    def __init__(self, rank: int, ranks: int, meet: Callable[[], None]) -> None:
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        self.facts: dict[str, str] = {}
        self.reduce: Callable[[Any], object] = dist.all_reduce

    def empty(self, elements: int, dtype: Any, way: str) -> Any:
        return None

    def call(self, task: Any, source: Any, target: Any) -> tuple[Callable[..., object], tuple[Any, ...]]:
        if task.way:
            raise Unsupported(f"torch.distributed has no way {task.way!r}")
        return getattr(dist, task.operation), torch_like.arguments(task, source, target)

    def close(self) -> None:
        dist.destroy_process_group()
