"""The device on which a backend of torch works."""

from __future__ import annotations

import torch

__all__ = ["device_of"]

_ACCELERATORS = {"nccl": "cuda", "xccl": "xpu"}


def device_of(backend: str) -> torch.device:
    """Return where tensors for ``backend`` have to be."""
    kind = _ACCELERATORS.get(backend, "cpu")
    return torch.device(kind, getattr(torch, kind).current_device()) if kind != "cpu" else torch.device("cpu")
