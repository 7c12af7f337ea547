"""A rank of a schedule: it makes every call, whatever came of those before."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch

import comm_orchestrator as dist
from faults.expected import LIMIT_S
from faults.model import result
from faults.scene import Scene
from faults.schedule import Schedule, make_schedule

__all__ = ["play"]


class PlantedError(Exception):
    """Nobody catches it."""


def play(scene: Scene) -> None:
    """Make the groups, then the steps, then end."""
    schedule = make_schedule(scene.spec.seed)
    scene.start()
    groups = [None, *(dist.new_group(list(ranks)) for ranks in schedule.groups[1:])]
    scene.meet("ready")
    scene.note("ready")
    for number, step in enumerate(schedule.steps):
        if number == schedule.at and scene.is_culprit:
            scene.fault()
            _act(schedule.fault)
        members = schedule.groups[step.group]
        if scene.rank in members:
            _call(scene, schedule, number, groups[step.group])
        if number >= schedule.at and schedule.culprit in members and not scene.is_culprit:
            _wait_for_members(scene, schedule, number)
    scene.end()


def _wait_for_members(scene: Scene, schedule: Schedule, number: int) -> None:
    """Return when the survivors have made a step: one that waits there keeps others waiting as long as their limit."""
    members = schedule.groups[schedule.steps[number].group]
    if scene.rank in members:
        scene.tell(f"step-{number}-{scene.rank}")
        return
    for rank in members:
        if rank != schedule.culprit:
            scene.wait_for(f"step-{number}-{rank}")


def _act(fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "exits":
        sys.exit(0)
    elif fault == "raises":
        raise PlantedError("planted")
    elif fault == "late":
        time.sleep(LIMIT_S + 1)


def _call(scene: Scene, schedule: Schedule, number: int, group: Any) -> None:
    differs = schedule.fault == "differs" and number == schedule.at and scene.is_culprit
    size = len(schedule.groups[schedule.steps[number].group])
    expected = torch.tensor(result(schedule, number, scene.rank))
    operation = schedule.steps[number].operation

    def call() -> torch.Tensor:
        value = float(scene.rank + 10 * number)
        if operation == "all_reduce":
            tensor = torch.full((2 if differs else 1,), value)
            dist.all_reduce(tensor, group=group)
            return tensor
        if operation == "barrier":
            dist.barrier(group)
            return expected
        if operation == "all_gather":
            parts = [torch.zeros(1) for _ in range(size)]
            dist.all_gather(parts, torch.tensor([value]), group=group)
            return torch.cat(parts)
        output = torch.zeros(size)
        dist.all_to_all_single(output, torch.full((size,), value), group=group)
        return output

    scene.attempt(str(number), call, expected)
