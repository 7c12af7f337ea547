"""Which kind of device this process computes on, and binding it to one."""

from __future__ import annotations

import torch

from comm_utils.errors import LaunchError

__all__ = ["bind_device", "device_type"]


def device_type() -> str:
    """``"cuda"``, ``"xpu"`` or ``"cpu"``: the first of them that torch can use here."""
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return kind
    return "cpu"


def bind_device(kind: str, local_rank: int | None) -> torch.device | None:
    """Make device ``local_rank`` the current one; None where there is nothing to choose or a choice was made already.

    A process that has touched a device before keeps the one it has: switching would leave its tensors behind.

    Raises:
        LaunchError: fewer devices than processes on this host.
    """
    if kind == "cpu" or local_rank is None:
        return None
    module = getattr(torch, kind)
    if module.is_initialized():
        return None
    count = module.device_count()
    if local_rank >= count:
        raise LaunchError(
            f"local rank {local_rank} has no {kind} device of its own: this host shows {count}; start at most {count} "
            f"processes a host, or choose a CPU backend with dist_backend='gloo'"
        )
    module.set_device(local_rank)
    return torch.device(kind, local_rank)
