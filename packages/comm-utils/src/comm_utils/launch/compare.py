"""Find launchers that contradict the facts in use."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from comm_utils.errors import LaunchError
from comm_utils.launch import slurm
from comm_utils.launch.info import LaunchInfo, integer
from comm_utils.launch.table import LAUNCHERS, Launchers
from comm_utils.launch.torchrun import set_alone

__all__ = ["contradictions"]

_COMPARED = ("rank", "world_size")


def contradictions(environ: Mapping[str, str], info: LaunchInfo, launchers: Launchers = LAUNCHERS) -> list[str]:
    """Return a sentence for every launcher that says another rank or world size than ``info``.

    Launchers that say the same share one: the variables of MPICH are those of PMI, too. A process that nobody launched
    although Slurm has allocated several tasks gets one as well, and one of ``RANK`` and ``WORLD_SIZE`` alone that says
    something else. There is none for a process that torchrun started: its agents run under srun and mpirun on purpose.
    """
    if info.launcher == "torchrun":
        return []
    found = []
    said = {(info.rank, info.world_size)}
    for _, launcher in launchers:
        try:
            other = launcher(environ)
        except LaunchError:
            continue  # variables that nobody uses may be incomplete
        # The last launcher recognises everything, and "nobody launched this process" contradicts nobody.
        if other is None or other.launcher in ("none", info.launcher) or (other.rank, other.world_size) in said:
            continue
        said.add((other.rank, other.world_size))
        differing = [name for name in _COMPARED if getattr(other, name) != getattr(info, name)]
        verb = "is" if len(differing) == 1 else "are"
        found.append(f"{other.launcher} says {_said(other, differing)}; {_said(info, differing)} {verb} used")
    alone = set_alone(environ)
    if alone is not None:
        variable, field = alone[0], alone[0].lower()
        with suppress(LaunchError):
            if (value := integer(environ, variable)) != getattr(info, field):
                found.append(f"environment variable {variable} is {value}; {_said(info, [field])} is used")
    if info.launcher == "none":
        with suppress(LaunchError):
            found += filter(None, [slurm.tasks_not_started(environ)])
    return found


def _said(info: LaunchInfo, names: list[str]) -> str:
    return " and ".join(
        f"{name.replace('_', ' ')} {getattr(info, name)} ({info.sources.get(name, info.launcher)})" for name in names
    )
