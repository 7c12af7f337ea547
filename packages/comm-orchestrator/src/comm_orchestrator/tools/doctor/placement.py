"""Check that the ranks of a host have cores of their own, and that none runs on several NUMA nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from comm_orchestrator.tools.doctor.finding import Finding
from comm_utils import topology
from comm_utils.topology import Placement, format_cpu_list, parse_cpu_list

__all__ = ["as_table", "described", "judge", "remedy_for"]


class _Report(Protocol):
    """The part of a rank's report that tells where it runs, and who started it."""

    @property
    def rank(self) -> int | None: ...
    @property
    def world_size(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def node_rank(self) -> int | None: ...
    @property
    def launcher(self) -> str: ...
    @property
    def placement(self) -> Mapping[str, Any]: ...


def as_table(placement: Placement, of_host: frozenset[int], sysfs: Path = topology.SYSFS) -> dict[str, Any]:
    """Return a placement for the report.

    Args:
        of_host: the hardware threads that the ranks of the host have together; their cores are listed by NUMA node.
    """
    by_node: dict[tuple[int, ...], list[tuple[int, frozenset[int]]]] = {}
    for core in topology.read_placement(of_host, sysfs).cores:
        where = topology.read_placement({min(core & of_host)}, sysfs)
        first_of_cache = min(where.caches[0]) if where.caches else 0
        by_node.setdefault(where.nodes, []).append((first_of_cache, core & of_host))
    return {
        "cpus": format_cpu_list(placement.cpus),
        "cores": [format_cpu_list(one) for one in placement.cores],
        "last_level_caches": [format_cpu_list(one) for one in placement.caches],
        "numa_nodes": list(placement.nodes),
        "packages": list(placement.packages),
        "cores_of_host": [
            [format_cpu_list(core) for _, core in sorted(by_node[node], key=lambda one: (one[0], min(one[1])))]
            for node in sorted(by_node)
        ],
        "cpus_online": os.cpu_count() or 1,
    }


def judge(reports: Sequence[_Report]) -> list[Finding]:
    """Return where ranks run, and warnings where they are in each other's way.

    Args:
        reports: of all ranks, or of this one alone; without ``placement`` where that is not known.
    """
    hosts: dict[tuple[str, int | None], dict[int, _Report]] = {}
    for one in reports:
        if one.placement.get("cpus"):
            hosts.setdefault((one.host, one.node_rank), {})[one.rank or 0] = one
    return [finding for neighbours in hosts.values() for finding in _of_host(neighbours)]


def _of_host(reports: Mapping[int, _Report]) -> list[Finding]:
    result = []
    shared = _sharing(reports)
    if len(reports) > 1:
        result += _spanning(reports)
    for ranks, what in shared:
        result.append(Finding("warning", "placement", what, _remedy(reports), ranks=ranks))
    warned = {rank for one in result for rank in one.ranks} | {rank for ranks, _ in shared for rank in ranks}
    for rank, one in reports.items():
        if rank not in warned:
            result.append(Finding("ok", "placement", described(one.placement), ranks=(rank,)))
    return result


def described(placement: Mapping[str, Any]) -> str:
    """Return a placement in a line."""
    nodes, caches = placement["numa_nodes"], placement["last_level_caches"]
    parts = [_cpus(placement["cpus"])]
    if nodes:
        parts.append(f"NUMA node{'s' if len(nodes) > 1 else ''} {format_cpu_list(nodes)}")
    if len(caches) == 1:
        parts.append(f"last-level cache of {_cpus(caches[0])}")
    elif caches:
        parts.append(f"{len(caches)} last-level caches")
    return ", ".join(parts)


def _cpus(text: str) -> str:
    return f"cpu{'' if text.isdigit() else 's'} {text}"


def _sharing(reports: Mapping[int, _Report]) -> list[tuple[tuple[int, ...], str]]:
    """Return ranks with fewer hardware threads, or else cores, than there are of them."""
    threads = {rank: parse_cpu_list(one.placement["cpus"]) for rank, one in reports.items()}
    found = []
    for ranks, cpus in topology.overcommitted(threads):
        have = _cpus(format_cpu_list(cpus))
        text = f"{len(ranks)} ranks run on {have} alone" if len(cpus) == 1 else f"{len(ranks)} ranks share {have}"
        found.append((ranks, f"{text}: they take turns"))
    taken = {rank for ranks, _ in found for rank in ranks}
    # A core is known by its first thread.
    cores = {
        rank: frozenset(min(parse_cpu_list(core)) for core in one.placement["cores"])
        for rank, one in reports.items()
        if rank not in taken
    }
    for ranks, firsts in topology.overcommitted(cores):
        many = "one core" if len(firsts) == 1 else f"{len(firsts)} cores"
        all_of_them = frozenset[int]().union(*(threads[rank] for rank in ranks))
        have = _cpus(format_cpu_list(all_of_them))
        found.append((ranks, f"{len(ranks)} ranks share {many}, of which {have} are hardware threads"))
    return found


def _spanning(reports: Mapping[int, _Report]) -> list[Finding]:
    result = []
    for rank, one in reports.items():
        nodes = one.placement["numa_nodes"]
        if len(nodes) > 1:
            text = f"{described(one.placement)}: its threads and its memory may be on different nodes"
            result.append(Finding("warning", "placement", text, _remedy(reports), ranks=(rank,)))
    return result


# --- what to do about it


def _remedy(reports: Mapping[int, _Report]) -> str:
    first = next(iter(reports.values()))
    # A rank that was started differently may know of more.
    known = max((one.placement["cores_of_host"] for one in reports.values()), key=lambda nodes: sum(map(len, nodes)))
    nodes = [[parse_cpu_list(core) for core in node] for node in known]
    online = first.placement["cpus_online"]
    return remedy_for(first.launcher, len(reports), first.world_size, nodes, online)


def remedy_for(
    launcher: str, ranks: int, world_size: int, nodes: Sequence[Sequence[frozenset[int]]], online: int
) -> str:
    """Return the command that gives each of the ``ranks`` of a host cores of its own, of one NUMA node.

    Args:
        nodes: the hardware threads of each core on which the ranks of the host may run, by NUMA node.
        online: the number of hardware threads that the host has.
    """
    cores = sum(map(len, nodes))
    if cores < ranks:
        options = _FEWER.get(launcher, "").format(cores)
        fewer = f"start at most {cores} rank{'s' if cores > 1 else ''} on this host{options and f' ({options})'}"
        if online < ranks:
            return fewer
        return (
            f"{fewer}, or let the job use more of its {online} hardware threads: start the launcher without taskset "
            "and numactl; docker run --cpuset-cpus; sbatch --cpus-per-task"
        )
    shares: list[frozenset[int]] = []
    for each in range(cores // ranks, 0, -1):
        shares = [
            frozenset[int]().union(*node[first : first + each])
            for node in nodes
            for first in range(0, len(node) - each + 1, each)
        ]
        if len(shares) >= ranks:
            break
    wanted = _Wanted(ranks, world_size, each, [format_cpu_list(one) for one in shares[:ranks]])
    return _COMMANDS.get(launcher, _by_hand)(wanted)


class _Wanted(NamedTuple):
    """A better placement: ``ranks`` and their ``cpus`` are those of a host, ``cores`` is how many each rank gets."""

    ranks: int
    world_size: int
    cores: int
    cpus: list[str]


def _torchrun(wanted: _Wanted) -> str:
    # torchrun's own --numa-binding follows GPUs: it fails without them.
    cpus = f"cpus=({' '.join(wanted.cpus)}); exec taskset -c ${{cpus[LOCAL_RANK]}}"
    return f"torchrun --nproc-per-node {wanted.ranks} --no-python bash -c '{cpus} python PROGRAM.py'"


def _by_hand(wanted: _Wanted) -> str:
    shown = [f"taskset -c {one} python PROGRAM.py" for one in wanted.cpus[:2]]
    return f"start the ranks of the host as {', '.join(shown)}{' and so on' if len(wanted.cpus) > 2 else ''}"


#: How fewer ranks are started on each host.
_FEWER = {
    "torchrun": "--nproc-per-node {}",
    "openmpi": "--map-by ppr:{}:node",
    "mpich": "-ppn {}",
    "intel_mpi": "-ppn {}",
    "slurm": "--ntasks-per-node={}",
}
_COMMANDS: dict[str, Callable[[_Wanted], str]] = {
    "torchrun": _torchrun,
    "openmpi": lambda wanted: (
        f"mpirun -n {wanted.world_size} --map-by slot:PE={wanted.cores} --bind-to core python PROGRAM.py"
    ),
    "mpich": lambda wanted: f"mpirun -n {wanted.world_size} -bind-to core:{wanted.cores} python PROGRAM.py",
    "intel_mpi": lambda wanted: (
        f"mpirun -n {wanted.world_size} -genv I_MPI_PIN 1 -genv I_MPI_PIN_DOMAIN auto:compact python PROGRAM.py"
    ),
    "slurm": lambda wanted: (
        f"srun --ntasks-per-node={wanted.ranks} --cpus-per-task={wanted.cores} --cpu-bind=cores python PROGRAM.py"
    ),
}
