"""Rank discovery: from the arguments, the launcher's variables, or MPI."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Integral
from typing import Any

import comm_config
from comm_orchestrator import mpi
from comm_utils.errors import ArgumentTypeError, LaunchError
from comm_utils.launch import Launchers, LaunchInfo, contradictions, discover, mpi_launcher, with_plugins
from comm_utils.launch.info import integer
from comm_utils.log import logger

__all__ = ["FIELDS", "find", "variables", "with_hosts"]

#: field of LaunchInfo -> the variable that other software looks for it in
FIELDS = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}


def find(
    environ: Mapping[str, str], rank: int, world_size: int, settings: comm_config.Settings, own_rendezvous: bool
) -> LaunchInfo:
    """Return the launch facts of this process, with their sources.

    Args:
        rank, world_size: of ``init_distributed``; -1 where they were not given.
        own_rendezvous: the caller named a place to meet, so none has to be found.

    Raises:
        LaunchError: facts are missing or contradict each other.
    """
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ArgumentTypeError(f"init_distributed: {name}: got {value!r:.60}; expected an integer")
    launchers = with_plugins()
    if rank < 0 and world_size < 0:
        launch = _discovered(environ, launchers, settings, own_rendezvous)
    elif rank < 0 or world_size < 0:
        given, missing = ("rank", "world_size") if world_size < 0 else ("world_size", "rank")
        raise LaunchError(f"init_distributed: got {given} without {missing}; pass both, or neither")
    else:
        launch = _from_arguments(environ, rank, world_size)
    for sentence in contradictions(environ, launch, launchers):
        logger.warning("init_distributed: %s", sentence)
    return _with_settings(launch, settings)


def _discovered(
    environ: Mapping[str, str], launchers: Launchers, settings: comm_config.Settings, own_rendezvous: bool
) -> LaunchInfo:
    launch = discover(environ, launchers)
    variable = mpi_launcher(environ) if settings.launch.auto_mpi_discovery else None
    port = launch.master_port or settings.launch.master_port
    if variable is not None and launch.launcher == "none":
        return mpi.discover(variable, port)
    lost = launch.world_size > 1 and launch.master_addr is None and settings.launch.master_addr is None
    if variable is not None and lost and not own_rendezvous:
        return mpi.complete(launch, variable, port)
    _warn_of_another_address(environ, launch, launchers)
    return launch


def _from_arguments(environ: Mapping[str, str], rank: int, world_size: int) -> LaunchInfo:
    numbers = {
        name: FIELDS[name] for name in ("local_rank", "local_world_size", "master_port") if FIELDS[name] in environ
    }
    sources = {name: f"environment variable {variable}" for name, variable in numbers.items()}
    values: dict[str, Any] = {name: integer(environ, variable) for name, variable in numbers.items()}
    if "MASTER_ADDR" in environ:
        sources["master_addr"] = "environment variable MASTER_ADDR"
    return LaunchInfo(
        "arguments",
        rank,
        world_size,
        master_addr=environ.get("MASTER_ADDR"),
        sources={"rank": "argument rank", "world_size": "argument world_size", **sources},
        **values,
    )


def _with_settings(launch: LaunchInfo, settings: comm_config.Settings) -> LaunchInfo:
    """Apply the configured address, which wins.

    Its port is a default, unless the launcher derived one from a job id.
    """
    origins = settings.sources
    sources = dict(launch.sources)
    stated = origins.get("launch.master_addr", "").startswith(("argument", "environment"))
    if settings.launch.master_addr is not None and (stated or "MASTER_ADDR" not in sources.get("master_addr", "")):
        sources["master_addr"] = origins["launch.master_addr"]
        launch = replace(launch, master_addr=settings.launch.master_addr, sources=sources)
    chosen = origins.get("launch.master_port", "default")
    derived = sources.get("master_port", "").startswith("derived")
    several = launch.world_size > 1 or launch.master_addr is not None
    if several and (launch.master_port is None or (derived and chosen != "default")):
        sources["master_port"] = chosen
        launch = replace(launch, master_port=settings.launch.master_port, sources=sources)
    elif chosen == "argument" and several and launch.master_port != settings.launch.master_port:
        logger.warning(
            "init_distributed: distributed_port=%d is ignored: the port is %s (%s)",
            settings.launch.master_port,
            launch.master_port,
            sources.get("master_port", launch.launcher),
        )
    return launch


def _warn_of_another_address(environ: Mapping[str, str], launch: LaunchInfo, launchers: Launchers) -> None:
    """Warn of a MASTER_ADDR that contradicts the launcher: it may be left over from another job."""
    if launch.launcher in ("none", "torchrun", "environment") or "MASTER_ADDR" not in environ:
        return
    with suppress(LaunchError):
        own = discover({name: value for name, value in environ.items() if name != "MASTER_ADDR"}, launchers)
        if own.master_addr is None or not _different(own.master_addr, environ["MASTER_ADDR"]):
            return
        logger.warning(
            "init_distributed: environment variable MASTER_ADDR is %s, and is used; %s would be met at %s (%s)",
            environ["MASTER_ADDR"],
            launch.launcher,
            own.master_addr,
            own.sources.get("master_addr", launch.launcher),
        )


def _different(one: str, other: str) -> bool:
    if one == other:
        return False
    with suppress(OSError, UnicodeError):
        hosts = [{str(info[4][0]) for info in socket.getaddrinfo(name, None)} for name in (one, other)]
        return hosts[0].isdisjoint(hosts[1])
    return False


def with_hosts(launch: LaunchInfo, host_of: Sequence[int]) -> LaunchInfo:
    """``launch`` with what its launcher did not say about hosts; ``host_of[rank]`` is the position of a rank's host."""
    mine = host_of[launch.rank]
    neighbours = [rank for rank, host in enumerate(host_of) if host == mine]
    met = {
        "local_rank": neighbours.index(launch.rank),
        "local_world_size": len(neighbours),
        "node_rank": mine,
    }
    if launch.local_rank is not None:
        # A launcher that numbers the ranks of a host in another order knows better.
        del met["local_rank"]
    unknown: dict[str, Any] = {name: value for name, value in met.items() if getattr(launch, name) is None}
    sources = {**launch.sources, **dict.fromkeys(unknown, "the ranks that met")}
    return replace(launch, sources=sources, **unknown)


def variables(launch: LaunchInfo, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that other software reads and that the environment does not have yet.

    A process that nobody launched with others gets none: what it starts may be launched with others.
    """
    if launch.launcher == "none":
        return {}
    values = {variable: getattr(launch, name) for name, variable in FIELDS.items()}
    return {name: str(value) for name, value in values.items() if value is not None and name not in environ}
