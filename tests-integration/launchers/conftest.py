"""One fixture for each kind of launcher; what this machine can't have is skipped, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from launchers import by_hand, hosts, mpi, slurm, torchrun
from launchers.hosts import Host
from launchers.launcher import Launcher
from launchers.mpi import Mpi
from launchers.slurm import Cluster

Start: TypeAlias = Callable[[pytest.FixtureRequest], Launcher]


def _skip_for(reason: str) -> None:
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """hostA and hostB, with a network between them."""
    _skip_for(hosts.missing())
    with hosts.two_hosts("hostA", "hostB") as both:
        yield both


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Slurm cluster of node01 and node02."""
    _skip_for(slurm.missing())
    with slurm.two_nodes() as running:
        yield running


def _mpi(name: str) -> Mpi:
    _skip_for(mpi.ALL[name].missing())
    return mpi.ALL[name]


def _mpirun(name: str) -> Start:
    return lambda request: mpi.mpirun(_mpi(name))


def _mpirun_in_allocation(name: str) -> Start:
    return lambda request: _cluster(request).mpirun(_mpi(name))


def _srun(plugin: str) -> Start:
    def start(request: pytest.FixtureRequest) -> Launcher:
        _skip_for(_cluster(request).missing(plugin))
        return _cluster(request).srun(f"--mpi={plugin}")

    return start


def _cluster(request: pytest.FixtureRequest) -> Cluster:
    cluster: Cluster = request.getfixturevalue("cluster")
    return cluster


# Which of these a test is run with, is the parameter of the fixture below.
LAUNCHERS: dict[str, Start] = {
    "python": lambda request: by_hand.python(),
    "torchrun": lambda request: torchrun.one_agent(),
    "torchrun-two-agents": lambda request: torchrun.two_agents(),
    "torchrun-two-hosts": lambda request: torchrun.over_hosts(request.getfixturevalue("two_hosts")),
    "by-hand-two-hosts": lambda request: by_hand.over_hosts(request.getfixturevalue("two_hosts")),
    **{name: _mpirun(name) for name in mpi.ALL},
    "srun": lambda request: _cluster(request).srun(),
    "srun-pmi2": _srun("pmi2"),
    "srun-pmix": _srun("pmix"),
    **{f"{name}-in-salloc": _mpirun_in_allocation(name) for name in (mpi.MPICH.name, mpi.INTEL_MPI.name)},
}


@pytest.fixture
def launcher(request: pytest.FixtureRequest) -> Launcher:
    """The launcher named by the indirect parameter of a test, started where it is a service."""
    return LAUNCHERS[request.param](request)
