"""Hydra's ``mpiexec``; test_recorded.py has the variables of a real one."""

from __future__ import annotations

import pytest

from comm_utils.launch import LaunchInfo, discover, mpich
from comm_utils.launch.ports import derived_port

# MPICH 5.0.2, rank 3 of 4 on two hosts.
PROCESS = {
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "9",
    "PMI_HOSTNAME": "node02",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}


def test_several_hosts() -> None:
    assert discover(PROCESS) == LaunchInfo(
        "mpich",
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        sources={
            "rank": "environment variable PMI_RANK",
            "world_size": "environment variable PMI_SIZE",
            "local_rank": "environment variable MPI_LOCALRANKID",
            "local_world_size": "environment variable MPI_LOCALNRANKS",
        },
    )


def test_one_host() -> None:
    found = discover({**PROCESS, "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3"})
    assert (found.master_addr, found.master_port, found.node_rank) == ("127.0.0.1", None, 0)


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"])
def test_the_batch_job_is_the_nearest_id(variable: str) -> None:
    found = discover({**PROCESS, variable: "77.server"})
    assert found.job_id == "77.server"
    assert found.master_port == derived_port("77.server")
    assert found.sources["master_port"] == f"derived from environment variable {variable}"


def test_without_the_sign_of_hydra() -> None:
    assert mpich.discover({"PMI_RANK": "0", "PMI_SIZE": "1"}) is None
    # Hydra's option -pmi-port: the size is not in the environment.
    assert mpich.discover({"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "PMI_ID": "0", "PMI_PORT": "a:1"}) is None
