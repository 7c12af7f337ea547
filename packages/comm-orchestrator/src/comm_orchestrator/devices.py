"""The kind of device that this process uses, and its binding to one device."""

from __future__ import annotations

import os

import torch

__all__ = ["bind_device", "device_type", "visible_devices"]

_CHOOSING = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


def device_type() -> str:
    """``"cuda"``, ``"xpu"`` or ``"cpu"``: the first of them that torch can use here."""
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind
    return "cpu"


def visible_devices(kind: str) -> tuple[int, str | None]:
    """Return how many devices of ``kind`` this process sees, and the variable that chose them."""
    if kind == "cpu":
        return 0, None
    visible = os.environ.get(_CHOOSING[kind])
    if "SLURM_GPUS_PER_TASK" in os.environ:
        # Where Slurm confines devices, each task's own is called 0.
        visible = f"{visible} of task {os.environ.get('SLURM_PROCID')}"
    return getattr(torch, kind).device_count(), visible


def bind_device(kind: str, index: int) -> torch.device | None:
    """Make device ``index`` the current one; None where there is nothing to choose or a choice was made already.

    A process that has touched a device before keeps the one it has: switching would leave its tensors behind.
    """
    if kind == "cpu":
        return None
    module = getattr(torch, kind)
    if module.is_initialized():
        return None
    module.set_device(index)
    return torch.device(kind, index)
