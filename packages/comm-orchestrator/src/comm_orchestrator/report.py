"""The lines that say what was set up, and where each fact came from."""

from __future__ import annotations

import comm_config
from comm_orchestrator.selector import Choice
from comm_utils import kernels
from comm_utils.launch import LaunchInfo

__all__ = ["FACTS", "describe", "facts", "headline"]

# By what a profile was measured, in a word; "quick" is by the first group on the host.
_EFFORTS = {"commctl tune": "tuned"}
# What time, level, rank and logger leave of a terminal of 80 columns.
_COLUMNS = 41

#: fields of LaunchInfo as people read them
FACTS = {
    "rank": "rank",
    "world_size": "world size",
    "local_rank": "local rank",
    "local_world_size": "local world size",
    "node_rank": "node rank",
    "master_addr": "master address",
    "master_port": "master port",
}


def facts(launch: LaunchInfo) -> list[tuple[str, object, str]]:
    """Return name, value and source of every launch fact, known or not."""
    return [
        (words, value, launch.sources.get(name, launch.launcher) if value is not None else "not known")
        for name, words in FACTS.items()
        for value in [getattr(launch, name)]
    ]


def headline(choice: Choice, launch: LaunchInfo) -> str:
    """Return what was set up, in one line of a terminal: libraries, ranks and, where they fit, the rest.

    That is the profile from which ranks in shared memory started, and the launcher.
    """
    libraries = dict.fromkeys(part.rpartition(":")[2] for part in choice.backend.split(","))
    ranks = f"{launch.world_size} rank{'s' if launch.world_size != 1 else ''}"
    text = f"initialised: {', '.join(libraries)}, {ranks}"
    launcher = f" ({'no launcher' if launch.launcher == 'none' else launch.launcher})"
    for more in (_profile(launch.world_size), launcher):
        text += more if len(text + more) <= _COLUMNS else ""
    return text


def _profile(world_size: int) -> str:
    found = kernels.transfer_profile()
    measured_by = None if found is None else found.get("world")
    if measured_by is None or world_size < 2:
        return ""
    return f", {_EFFORTS.get(measured_by, 'quick') if measured_by else 'no'} profile"


def describe(choice: Choice, launch: LaunchInfo, settings: comm_config.Settings, place: str) -> str:
    """Return all facts for the log: backend, launch facts, store and timeout, each with its source in brackets."""
    sources = settings.sources
    why = sources["process_group.backend"] if settings.process_group.backend is not None else choice.reason
    parts = [f"backend {choice.backend} ({why})", f"launcher {launch.launcher}"]
    parts += [f"{words} {value} ({source})" for words, value, source in facts(launch) if value is not None]
    if place:
        parts.append(f"met {place}")
    if settings.timeouts.collective_s is not None:
        parts.append(f"timeout {settings.timeouts.collective_s:g} s ({sources['timeouts.collective_s']})")
    return "facts: " + ", ".join(parts)
