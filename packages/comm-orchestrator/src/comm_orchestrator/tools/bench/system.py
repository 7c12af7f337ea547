"""Describe the system that is measured, and exchange facts and times between its ranks."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from comm_orchestrator import facade
from comm_orchestrator.tools.devices import device_of
from comm_utils.host_identity import host_name

__all__ = ["Exchange", "describe_system", "hosts", "rank_facts"]

_PACKAGES = (
    *("comm-orchestrator", "comm-utils", "comm-config", "comm-collectives"),
    *("comm-backend-torch", "comm-backend-ccl", "mpi4py", "deepspeed", "numpy"),
)


def rank_facts(device: torch.device) -> dict[str, Any]:
    """Return the facts about this rank that the others need."""
    name = getattr(torch, device.type).get_device_name(device) if device.type != "cpu" else _cpu()
    return {"host": host_name(), "pid": os.getpid(), "device": str(device), "name": name}


def hosts(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return hosts in the order of their first ranks, each with its ranks."""
    found: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        found.setdefault(facts["host"], []).append(rank)
    return [{"host": host, "ranks": of_host} for host, of_host in found.items()]


def describe_system(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the results say of this machine."""
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


class Exchange:
    """Over the world, on its own backend."""

    def __init__(self) -> None:
        self.rank, self.ranks = facade.get_rank(), facade.get_world_size()
        self._device = device_of(facade.get_backend())

    def meet(self) -> None:
        """Return when all ranks have come here."""
        facade.barrier()

    def gather(self, numbers: list[float]) -> list[list[float]]:
        """Return every rank's ``numbers``, as many on each."""
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        everyone = torch.empty((self.ranks, len(numbers)), dtype=torch.float64, device=self._device)
        facade.all_gather_into_tensor(everyone, own)
        found: list[list[float]] = everyone.tolist()
        return found

    def facts(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's ``own``: numbers and texts."""
        found: list[Any] = [None] * self.ranks
        facade.all_gather_object(found, own)
        return found
