"""``mpirun`` of Intel MPI; test_recorded.py has the variables of a real one."""

from __future__ import annotations

from comm_utils.launch import LaunchInfo, discover, intel_mpi
from comm_utils.launch.ports import derived_port

# Intel MPI 2021.18, rank 3 of 4 on two hosts, both of which have the same I_MPI_HYDRA_UUID.
PROCESS = {
    "HYDRA_BSTRAP_NODE_ID": "1",
    "I_MPI_HYDRA_UUID": "e8430000-867f-2893-c060-06009e8e5e3e",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "12",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}


def test_several_hosts() -> None:
    assert discover(PROCESS) == LaunchInfo(
        "intel_mpi",
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        master_port=derived_port(PROCESS["I_MPI_HYDRA_UUID"]),
        job_id=PROCESS["I_MPI_HYDRA_UUID"],
        sources={
            "rank": "environment variable PMI_RANK",
            "world_size": "environment variable PMI_SIZE",
            "local_rank": "environment variable MPI_LOCALRANKID",
            "local_world_size": "environment variable MPI_LOCALNRANKS",
            "master_port": "derived from environment variable I_MPI_HYDRA_UUID",
            "job_id": "environment variable I_MPI_HYDRA_UUID",
        },
    )


def test_a_shell_with_intel_mpi_on_its_path_is_no_sign() -> None:
    assert intel_mpi.discover({"I_MPI_ROOT": "/opt/intel/oneapi/mpi/latest", "PMI_RANK": "0", "PMI_SIZE": "1"}) is None
