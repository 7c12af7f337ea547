"""No launcher at all: one process, or ranks whose variables somebody typed on each host."""

from __future__ import annotations

from collections.abc import Sequence

from launchers.hosts import Host
from launchers.launcher import Launcher
from launchers.processes import Command

PORT = 29500


def python() -> Launcher:
    """One process, without any variable, whatever number of ranks is asked for."""
    return Launcher("python", lambda program, ranks: [Command(program)])


def over_hosts(hosts: Sequence[Host]) -> Launcher:
    """Consecutive ranks on each host, with the variables that torch asks for and no others."""

    def commands(program: Sequence[str], ranks: int) -> list[Command]:
        per_host = -(-ranks // len(hosts))
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": hosts[0].name, "MASTER_PORT": str(PORT)}
        return [hosts[rank // per_host].command(program, {**common, "RANK": str(rank)}) for rank in range(ranks)]

    return Launcher("by hand over hosts", commands)
