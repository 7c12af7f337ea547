"""Arguments in the order of ``torch.distributed``."""

from __future__ import annotations

from typing import Any

__all__ = ["arguments"]


def arguments(task: Any, source: Any, target: Any) -> tuple[Any, ...]:
    if task.operation == "all_reduce":
        return (source,)
    return (source, 0) if task.operation == "broadcast" else (target, source)
