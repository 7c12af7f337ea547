"""The device on which a backend of torch works."""

from __future__ import annotations

import torch

__all__ = ["device_of", "devices_of"]

_ACCELERATORS = {"nccl": "cuda", "xccl": "xpu"}


def device_of(backend: str) -> torch.device:
    """Return where tensors for ``backend`` have to be."""
    kind = _ACCELERATORS.get(backend, "cpu")
    return torch.device(kind, getattr(torch, kind).current_device()) if kind != "cpu" else torch.device("cpu")


def devices_of(backend: str) -> dict[bool, torch.device]:
    """Return the devices for tensors, by whether they are to be on an accelerator.

    Args:
        backend: such as ``cpu:gloo,cuda:nccl``; both devices are the same where it has one.
    """
    found = [device_of(part.rpartition(":")[2]) for part in backend.split(",")]
    return {wanted: next((one for one in found if (one.type != "cpu") == wanted), found[0]) for wanted in (False, True)}
