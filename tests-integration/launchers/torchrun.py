"""torchrun: one agent, or one agent for each node."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from launchers.hosts import Host
from launchers.launcher import Launcher
from launchers.processes import Command

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
PORT = 29500


def one_agent() -> Launcher:
    def commands(program: Sequence[str], ranks: int) -> list[Command]:
        return [Command([*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", *_script(program)])]

    return Launcher("torchrun", commands)


def two_agents() -> Launcher:
    """Two nodes that are both this machine."""

    def commands(program: Sequence[str], ranks: int) -> list[Command]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        return [Command(_agent(program, ranks, node, "127.0.0.1", port)) for node in range(2)]

    return Launcher("torchrun, two agents", commands)


def over_hosts(hosts: Sequence[Host]) -> Launcher:
    """One agent on each of two hosts."""

    def commands(program: Sequence[str], ranks: int) -> list[Command]:
        agents = [_agent(program, ranks, node, hosts[0].name, PORT) for node in range(2)]
        return [host.command(agent) for host, agent in zip(hosts, agents, strict=True)]

    return Launcher("torchrun over hosts", commands)


def _agent(program: Sequence[str], ranks: int, node: int, address: str, port: int) -> list[str]:
    nodes = ["--nnodes=2", f"--node-rank={node}", f"--nproc-per-node={ranks // 2}"]
    return [*TORCHRUN, *nodes, f"--master-addr={address}", f"--master-port={port}", *_script(program)]


def _script(program: Sequence[str]) -> Sequence[str]:
    # torchrun puts the interpreter before a script itself.
    is_script = program[0] == sys.executable and not program[1].startswith("-")
    return program[1:] if is_script else ["--no-python", *program]
