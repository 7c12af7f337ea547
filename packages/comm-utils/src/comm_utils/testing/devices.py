"""Ranks of NCCL that share a GPU."""

from __future__ import annotations

import os
from typing import Any

from comm_utils.testing.payload import per_rank

__all__ = ["sharing_device"]


def sharing_device(world_size: int) -> dict[str, Any]:
    """Return ``env`` for ranks that all use the first CUDA device, each as if it were on a host of its own.

    NCCL refuses two ranks of one host on one device. It takes ranks with different ``NCCL_HOSTID`` for ranks of
    different hosts, and moves their data over sockets. The device changes from the kernels of one process to those of
    another every few milliseconds, so each collective takes that long: these ranks show what is right, not what is
    fast.

    Args:
        world_size: of the ranks that get it.
    """
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return {
        # CUDA reads up to the first number that is no device; ranks that see the same list would count as sharing.
        "CUDA_VISIBLE_DEVICES": per_rank(device + ",-1" * rank for rank in range(world_size)),
        "NCCL_HOSTID": per_rank(f"host-of-rank-{rank}" for rank in range(world_size)),
        "NCCL_SOCKET_IFNAME": "=lo",
    }
