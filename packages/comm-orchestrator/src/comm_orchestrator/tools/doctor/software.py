"""Check the installed packages and the communication libraries that they provide."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import torch
import torch.distributed as c10d

import comm_config
from comm_orchestrator import devices, selector
from comm_orchestrator.tools.doctor.finding import Finding, from_error
from comm_utils.backend import Availability
from comm_utils.errors import BackendUnavailableError

__all__ = ["OURS", "check_backends", "check_packages", "torch_build", "versions"]

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
    """Return the version that torch was built with; None where it was built without."""
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


def check_packages(found: Mapping[str, str | None], build: Mapping[str, Any]) -> list[Finding]:
    """Return whether the packages fit together."""
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


def check_backends(available: Mapping[str, Availability], settings: comm_config.Settings) -> list[Finding]:
    """Return whether ``init_distributed()`` would find a library to use."""
    findings = [
        Finding("warning", "backends", f"{name}: {one.reason}", one.remedy, of_host=True)
        for name, one in available.items()
        if not one.usable and "cannot be imported" in one.reason
    ]
    findings += [
        Finding("ok", "backends", f"{name}: {', '.join(f'{what} {value}' for what, value in one.details.items())}")
        for name, one in available.items()
        if one.usable and one.details
    ]
    usable = sorted(name for name, one in available.items() if one.usable)
    named = settings.process_group.backend
    if named is not None:
        source = settings.sources["process_group.backend"]
        try:
            selector.choose(named, devices.device_type())
            chosen = f"{named} is asked for ({source}) and can be used"
        except BackendUnavailableError as error:
            reported = from_error("backends", error)
            remedy = reported.remedy or f"name one of {', '.join(usable)}"
            return [*findings, Finding("problem", "backends", f"{reported.found} ({source})", remedy)]
    else:
        kind = devices.device_type()
        unavailable_reasons = selector.unavailable_reasons(kind)
        best = next((backend for backend, problem in unavailable_reasons.items() if problem is None), None)
        if best is None:
            why = "; ".join(str(problem) for problem in unavailable_reasons.values())
            text = f"no library for {kind} tensors can be used: {why}"
            return [*findings, Finding("problem", "backends", text, "install a build of torch that has gloo")]
        accelerator = next(iter(unavailable_reasons))
        if kind != "cpu" and best != accelerator:
            text = f"there are {kind} devices, but {unavailable_reasons[accelerator]}; {best} is used instead"
            findings.append(Finding("warning", "backends", text, remedy_for(available, accelerator)))
        chosen = f"{best} is chosen on {kind}"
    return [*findings, Finding("ok", "backends", f"{chosen}; usable here: {', '.join(usable)}", of_host=True)]


def remedy_for(available: Mapping[str, Availability], backend: str) -> str:
    """Return the remedy that makes ``backend`` usable."""
    parts = [available.get(part.rpartition(":")[2]) for part in backend.split(",")]
    return next((one.remedy for one in parts if one is not None and not one.usable), "install a torch that has it")
