"""Which communication libraries can be used, and whether that suffices."""

from __future__ import annotations

from collections.abc import Mapping

import comm_config
from comm_orchestrator import devices, selector
from comm_orchestrator.tools.doctor.finding import Finding, from_error
from comm_utils.backend import Availability
from comm_utils.errors import BackendUnavailableError

__all__ = ["check"]


def check(available: Mapping[str, Availability], settings: comm_config.Settings) -> list[Finding]:
    """Whether ``init_distributed()`` would find a library to use."""
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
            selector.choose(named)
            chosen = f"{named} is asked for ({source}) and can be used"
        except BackendUnavailableError as error:
            told = from_error("backends", error)
            remedy = told.remedy or f"name one of {', '.join(usable)}"
            return [*findings, Finding("problem", "backends", f"{told.found} ({source})", remedy)]
    else:
        kind = devices.device_type()
        obstacles = selector.obstacles(kind)
        best = next((backend for backend, problem in obstacles.items() if problem is None), None)
        if best is None:
            why = "; ".join(str(problem) for problem in obstacles.values())
            text = f"no library for {kind} tensors can be used: {why}"
            return [*findings, Finding("problem", "backends", text, "install a build of torch that has gloo")]
        accelerator = next(iter(obstacles))
        if kind != "cpu" and best != accelerator:
            text = f"there are {kind} devices, but {obstacles[accelerator]}; {best} is used instead"
            findings.append(Finding("warning", "backends", text, available_remedy(available, accelerator)))
        chosen = f"{best} is chosen on {kind}"
    return [*findings, Finding("ok", "backends", f"{chosen}; usable here: {', '.join(usable)}", of_host=True)]


def available_remedy(available: Mapping[str, Availability], backend: str) -> str:
    """What would make ``backend`` usable."""
    parts = [available.get(part.rpartition(":")[2]) for part in backend.split(",")]
    return next((one.remedy for one in parts if one is not None and not one.usable), "install a torch that has it")
