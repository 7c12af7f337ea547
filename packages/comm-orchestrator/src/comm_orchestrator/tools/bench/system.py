"""What it was measured on."""

from __future__ import annotations

import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["described", "hosts", "of_rank"]

_PACKAGES = (
    *("comm-orchestrator", "comm-utils", "comm-config", "comm-collectives"),
    *("comm-backend-torch", "comm-backend-ccl", "mpi4py", "deepspeed", "numpy"),
)


def of_rank(device: torch.device) -> dict[str, Any]:
    """What the others have to know of this rank."""
    name = getattr(torch, device.type).get_device_name(device) if device.type != "cpu" else _cpu()
    return {"host": socket.gethostname(), "pid": os.getpid(), "device": str(device), "name": name}


def hosts(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hosts in the order of their first ranks, each with its ranks."""
    found: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        found.setdefault(facts["host"], []).append(rank)
    return [{"host": host, "ranks": of_host} for host, of_host in found.items()]


def described(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """For the results."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    devices = sorted({facts["name"] for facts in ranks if facts["device"] != "cpu"})
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "packages": packages,
        "cpu": _cpu(),
        "devices": devices,
        "hosts": hosts(ranks),
        "ranks": len(ranks),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
