"""Asking MPI itself, through mpi4py, where the launcher's variables do not tell everything."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
from dataclasses import replace
from typing import Any

from comm_orchestrator import interfaces
from comm_utils.errors import LaunchError
from comm_utils.host_identity import host_name
from comm_utils.launch import LaunchInfo, size_beside

__all__ = ["complete", "discover", "is_installed"]


def is_installed() -> bool:
    """Return whether mpi4py can be imported; does not import it, which would start MPI."""
    return importlib.util.find_spec("mpi4py") is not None


def discover(variable: str, port: int) -> LaunchInfo:
    """Return this process's facts in ``MPI.COMM_WORLD``; called by all of its processes.

    Args:
        variable: shows that an MPI launcher started this process.
        port: that rank 0 is to listen on where all run on one host; elsewhere it chooses a free one.

    Raises:
        LaunchError: mpi4py is not installed, or does not work with the MPI that started this process.
    """
    if not is_installed():
        raise LaunchError(
            f"environment variable {variable} shows that an MPI launcher started this process, but its variables do "
            f"not tell all about it{_missing(variable)}; install mpi4py with: pip install 'comm-orchestrator[mpi]', or "
            "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    mpi = _mpi(variable)
    world = mpi.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    host = world.Split_type(mpi.COMM_TYPE_SHARED)
    local_rank, local_size = host.Get_rank(), host.Get_size()
    host.Free()
    place = world.bcast(_rendezvous_address(local_size == size, port) if rank == 0 else None, root=0)
    if isinstance(place, str):
        raise LaunchError(place)
    address, chosen = place
    names = ("rank", "world_size", "local_rank", "local_world_size", "master_addr", "master_port")
    return LaunchInfo(
        "mpi4py",
        rank,
        size,
        local_rank,
        local_size,
        master_addr=address,
        master_port=chosen,
        sources=dict.fromkeys(names, "mpi4py"),
    )


def complete(launch: LaunchInfo, variable: str, port: int) -> LaunchInfo:
    """``launch``, whose launcher did not say where rank 0 is, with what MPI says.

    Raises:
        LaunchError: as :func:`discover`, or where MPI contradicts the launcher.
    """
    found = discover(variable, port)
    if (found.rank, found.world_size) != (launch.rank, launch.world_size):
        raise LaunchError(
            f"{launch.launcher} says rank {launch.rank} of {launch.world_size} ({variable}), mpi4py says rank "
            f"{found.rank} of {found.world_size}: mpi4py uses another MPI than the one that started "
            "this process; install an mpi4py for that MPI, or set MASTER_ADDR to the host of rank 0"
        )
    sources = {**launch.sources, "master_addr": "mpi4py", "master_port": "mpi4py"}
    return replace(launch, master_addr=found.master_addr, master_port=found.master_port, sources=sources)


def _mpi(variable: str) -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"an MPI launcher started this process ({variable}{_missing(variable)}), but mpi4py cannot be used: "
            f"{str(error).splitlines()[0]}; install an mpi4py for that MPI, or set RANK, WORLD_SIZE, LOCAL_RANK, "
            "MASTER_ADDR and MASTER_PORT"
        ) from error
    return MPI


def _missing(variable: str) -> str:
    beside = size_beside(variable)
    return f", and {beside} is not set" if beside is not None and beside not in os.environ else ""


def _rendezvous_address(alone: bool, port: int) -> tuple[str, int] | str:
    """Rank 0's own address, and a port that is free there now; or, for all ranks to hear, why there is none."""
    address = "127.0.0.1" if alone else _address()
    if address is None:
        return f"{host_name()}, where rank 0 runs, has no network address that other hosts could reach"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for candidate in (port, 0):
        try:
            with socket.create_server((address, candidate), family=family) as server:
                return address, server.getsockname()[1]
        except OSError:
            continue
    return f"rank 0 cannot listen at {address} of {host_name()}"


def _address() -> str | None:
    found = interfaces.addresses()
    own = {address for addresses in found.values() for address in addresses}
    name = interfaces.local_address_to(host_name())
    if name is not None and name in own and not ipaddress.ip_address(name).is_loopback:
        return name
    return interfaces.outward_address(found)
