"""Rank 1 makes another call than the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import comm_orchestrator as dist
from faults.scene import Scene

__all__ = ["dtype", "extra", "missing", "op", "order", "root", "shape"]

# Ranks 0 and 2 are in their call by then.
_IN_THE_CALL_S = 0.5
Call = Callable[[], Any]


def shape(scene: Scene) -> None:
    """Another number of elements."""
    _play(scene, lambda: [("all_reduce", lambda: _sum(scene, 900 if scene.is_culprit else 1000), ...)])


def dtype(scene: Scene) -> None:
    """The same number of bytes, of another kind."""
    kind = torch.int32 if scene.is_culprit else torch.float32
    _play(scene, lambda: [("all_reduce", lambda: _sum(scene, 1000, kind), ...)])


def op(scene: Scene) -> None:
    """Another reduction."""
    name = "max" if scene.is_culprit else "sum"
    _play(scene, lambda: [("all_reduce", lambda: _sum(scene, 1000, op=name), ...)])


def root(scene: Scene) -> None:
    """Another source."""
    _play(scene, lambda: [_broadcast_of(scene, 1 if scene.is_culprit else 0)])


def missing(scene: Scene) -> None:
    """One call less than the others."""

    def calls() -> list[tuple[str, Call, Any]]:
        both = [("all_reduce", lambda: _sum(scene, 1000), ...), _broadcast_of(scene, 0)]
        return both[1:] if scene.is_culprit else both

    _play(scene, calls)


def extra(scene: Scene) -> None:
    """One call more than the others."""

    def calls() -> list[tuple[str, Call, Any]]:
        both = [_broadcast_of(scene, 0), ("all_reduce", lambda: _sum(scene, 1000), ...)]
        return both if scene.is_culprit else both[1:]

    _play(scene, calls)


def order(scene: Scene) -> None:
    """The same calls on two groups, the second first."""

    def calls() -> list[tuple[str, Call, Any]]:
        ranks = list(range(scene.world_size))
        groups = [dist.new_group(ranks), dist.new_group(ranks)]
        if scene.moment == "after":
            for group in groups:
                scene.add(group)
        both: list[tuple[str, Call, Any]] = [
            ("all_reduce", lambda group=group: _sum(scene, 1000, group=group), None) for group in groups
        ]
        return both[::-1] if scene.is_culprit else both

    _play(scene, calls)


def _play(scene: Scene, make: Callable[[], list[tuple[str, Call, Any]]]) -> None:
    scene.start()
    calls = make()
    scene.warm()
    if scene.is_culprit:
        if scene.moment == "during":
            time.sleep(_IN_THE_CALL_S)
        scene.fault()
    if all(scene.attempt(label, call, expected) for label, call, expected in calls):
        scene.keep_calling()
    scene.meet("end")
    scene.end()


def _sum(
    scene: Scene, numbers: int, kind: torch.dtype = torch.float32, op: str = "sum", group: Any = None
) -> torch.Tensor:
    tensor = torch.full((numbers,), scene.rank + 1, dtype=kind)
    dist.all_reduce(tensor, op, group=group)
    return tensor


def _broadcast_of(scene: Scene, source: int) -> tuple[str, Call, Any]:
    """Return a call which is right where it gives what its own source has: a source keeps its tensor."""
    return "broadcast", lambda: _broadcast(scene, source), torch.full((1000,), float(source))


def _broadcast(scene: Scene, source: int) -> torch.Tensor:
    tensor = torch.full((1000,), float(scene.rank))
    dist.broadcast(tensor, source)
    return tensor
