"""What real launchers set: variables of each rank, recorded on hosts named node01 and node02.

Open MPI 5.0.11, MPICH 5.0.2, Intel MPI 2021.18 and Slurm 22.05. Variables that name no rank, host or job are left out.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from comm_utils.launch import contradictions, discover

LOOPBACK = "127.0.0.1"
# launcher, (local rank, local world size, node rank) of each rank, master address, whether a port is derived
EXPECTED: dict[str, tuple[str, list[tuple[int, int, int | None]], str | None, bool]] = {
    # Open MPI numbered the ranks of this host by the cores they were bound to.
    "openmpi": ("openmpi", [(0, 4, 0), (2, 4, 0), (1, 4, 0), (3, 4, 0)], LOOPBACK, True),
    "openmpi again": ("openmpi", [(0, 4, 0), (2, 4, 0), (1, 4, 0), (3, 4, 0)], LOOPBACK, True),
    "openmpi under srun": ("openmpi", [(0, 2, 0), (1, 2, 0)], LOOPBACK, True),
    "mpich": ("mpich", [(0, 4, 0), (1, 4, 0), (2, 4, 0), (3, 4, 0)], LOOPBACK, False),
    "mpich under srun": ("mpich", [(0, 2, 0), (1, 2, 0)], LOOPBACK, True),
    "mpich in salloc": ("mpich", [(0, 3, None), (1, 3, None), (2, 3, None), (0, 1, None)], None, True),
    "intel_mpi": ("intel_mpi", [(0, 4, 0), (1, 4, 0), (2, 4, 0), (3, 4, 0)], LOOPBACK, True),
    "intel_mpi again": ("intel_mpi", [(0, 4, 0), (1, 4, 0), (2, 4, 0), (3, 4, 0)], LOOPBACK, True),
    "intel_mpi under srun": ("intel_mpi", [(0, 2, 0), (1, 2, 0)], LOOPBACK, True),
    "intel_mpi in salloc": ("intel_mpi", [(0, 3, None), (1, 3, None), (2, 3, None), (0, 1, None)], None, True),
    "srun": ("slurm", [(0, 3, 0), (1, 3, 0), (2, 3, 0), (0, 1, 1)], "node01", True),
    "srun one node": ("slurm", [(0, 2, 0), (1, 2, 0)], LOOPBACK, True),
    "srun one task": ("slurm", [(0, 1, 0)], LOOPBACK, True),
    "srun cyclic": ("slurm", [(0, 3, 0), (0, 1, 1), (1, 3, 0), (2, 3, 0)], "node01", True),
    "srun unequal": ("slurm", [(0, 2, 0), (1, 2, 0), (0, 1, 1)], "node01", True),
    "srun heterogeneous job": ("slurm", [(0, 1, 0), (0, 2, 1), (1, 2, 1)], "node01", True),
    "srun --mpi=pmi2": ("slurm", [(0, 3, 0), (1, 3, 0), (2, 3, 0), (0, 1, 1)], "node01", True),
    "srun --mpi=pmix": ("slurm", [(0, 3, 0), (1, 3, 0), (2, 3, 0), (0, 1, 1)], "node01", True),
    "srun in sbatch": ("slurm", [(0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1)], "node01", True),
    "sbatch": ("none", [(0, 1, 0)], None, False),
    "salloc": ("none", [(0, 1, 0)], None, False),
}


def _recorded() -> dict[str, list[dict[str, str]]]:
    text = (Path(__file__).parent / "recorded.json").read_text()
    return {name: [{**run["same"], **rank} for rank in run["ranks"]] for name, run in json.loads(text).items()}


RECORDED = _recorded()


def test_every_record_is_checked() -> None:
    assert RECORDED.keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_facts(name: str) -> None:
    launcher, hosts, master_addr, port = EXPECTED[name]
    found = [discover(environ) for environ in RECORDED[name]]
    assert [info.launcher for info in found] == [launcher] * len(hosts)
    assert [(info.rank, info.world_size) for info in found] == [(rank, len(hosts)) for rank in range(len(hosts))]
    assert [(info.local_rank, info.local_world_size, info.node_rank) for info in found] == hosts
    assert {info.master_addr for info in found} == {master_addr}
    assert len({info.job_id for info in found}) == 1
    assert len({info.master_port for info in found}) == 1
    assert (found[0].master_port is not None) == port


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_value_has_a_source(name: str) -> None:
    for environ in RECORDED[name]:
        info = discover(environ)
        fields = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "master_addr", "master_port")
        assert {field for field in (*fields, "job_id") if getattr(info, field) is not None} == info.sources.keys()


@pytest.mark.parametrize("name", sorted(EXPECTED.keys() - {"sbatch", "salloc"}))
def test_nothing_contradicts_the_launcher(name: str) -> None:
    for environ in RECORDED[name]:
        assert contradictions(environ, discover(environ)) == []


@pytest.mark.parametrize("name", ["sbatch", "salloc"])
def test_slurm_has_allocated_tasks_that_srun_has_not_started(name: str) -> None:
    for environ in RECORDED[name]:
        (one,) = contradictions(environ, discover(environ))
        assert one.startswith(
            "Slurm has allocated 4 tasks (environment variable SLURM_NTASKS), but srun has not started"
        )
        assert contradictions({**environ, "SLURM_NTASKS": "1", "SLURM_NPROCS": "1"}, discover(environ)) == []


@pytest.mark.parametrize("name", ["openmpi", "intel_mpi"])
def test_another_launch_is_another_job(name: str) -> None:
    first, second = (discover(RECORDED[run][0]) for run in (name, f"{name} again"))
    assert first.job_id != second.job_id
    assert first.master_port != second.master_port
