"""Which packages are installed, and how torch was built."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import torch
import torch.distributed as c10d

from comm_orchestrator.tools.doctor.finding import Finding

__all__ = ["OURS", "check", "torch_build", "versions"]

_OTHERS = ("torch", "numpy", "mpi4py", "psutil", "pydantic")


def _siblings() -> tuple[str, ...]:
    """comm-orchestrator, and every package of the family that it can use."""
    names = {re.split(r"[^\w.-]", one)[0] for one in requires("comm-orchestrator") or ()}
    return ("comm-orchestrator", *sorted(name for name in names if name.startswith("comm-")))


OURS = _siblings()


def versions() -> dict[str, str | None]:
    """Package -> version, None where it is not installed; ``python`` comes first."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in (*OURS, *_OTHERS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["torch"] = str(torch.__version__)  # with the kind of build, which the metadata may lack
    return found


def torch_build() -> dict[str, Any]:
    """What torch was built with; None where it was built without."""
    nccl = _nccl() if c10d.is_available() and c10d.is_nccl_available() else None
    return {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "xpu": getattr(torch.version, "xpu", None),
        "nccl": nccl,
        "distributed": c10d.is_available(),
        "debug": torch.version.debug,
        "git": torch.version.git_version,
    }


def _nccl() -> str:
    module: Any = torch.cuda.nccl
    found = module.version()
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


def check(found: Mapping[str, str | None], build: Mapping[str, Any]) -> list[Finding]:
    """Whether the packages fit together."""
    if not build["distributed"]:
        text = f"torch {found['torch']} was built without torch.distributed"
        return [Finding("problem", "packages", text, "pip install --force-reinstall torch", of_host=True)]
    ours = {name: found[name] for name in OURS if found.get(name) is not None}
    wanted = ours["comm-orchestrator"]
    odd = {name: one for name, one in ours.items() if one != wanted}
    if odd:
        listed = ", ".join(f"{name} {one}" for name, one in odd.items())
        remedy = "pip install " + " ".join(f"{name}=={wanted}" for name in odd)
        text = f"comm-orchestrator is {wanted}, but {listed} is installed beside it"
        return [Finding("problem", "packages", text, remedy, of_host=True)]
    text = f"comm-orchestrator {wanted}, torch {found['torch']}, Python {found['python']}"
    return [Finding("ok", "packages", text, of_host=True)]
