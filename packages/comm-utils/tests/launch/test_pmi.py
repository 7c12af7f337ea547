"""Generic PMI, and what PMIx leaves open."""

from __future__ import annotations

import pytest

from comm_utils.launch import LaunchInfo, discover, mpi_launcher

# https://github.com/SchedMD/slurm/blob/master/src/plugins/mpi/cray_shasta/apinfo.c (PALS_*) and
# https://github.com/argonne-lcf/alcf-nccl-tests/blob/main/pytests/launcher.sh (PMI_*), rank 3 of 4 on two hosts
PALS = {
    "PALS_APID": "6f5a1c0e",
    "PALS_LOCAL_RANKID": "1",
    "PALS_NODEID": "1",
    "PALS_RANKID": "3",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
# https://pmix.github.io/standard, https://docs.openpmix.org: what a PMIx server gives to a client that is not MPI's.
PMIX = {
    "PMIX_HOSTNAME": "node01",
    "PMIX_NAMESPACE": "prterun-node01-4711@1",
    "PMIX_RANK": "2",
    "PMIX_SERVER_URI41": "prterun-node01-4711@0.0;tcp4://127.0.0.1:59457",
    "PMIX_VERSION": "5.0.4",
}


def test_pals() -> None:
    found = discover(PALS)
    assert found == LaunchInfo(
        "pmi", 3, 4, 1, 2, 1, master_port=found.master_port, job_id="6f5a1c0e", sources=found.sources
    )
    assert found.sources["node_rank"] == "environment variable PALS_NODEID"
    assert found.sources["master_port"] == "derived from environment variable PALS_APID"


def test_rank_and_size_are_enough() -> None:
    found = discover({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "3", "PMI_JOBID": "9"})
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (1, 2, None, None)
    assert (found.node_rank, found.master_addr, found.job_id) == (None, None, "9")


@pytest.mark.parametrize(
    "local",
    [
        {"PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
        {"PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"},
    ],
)
def test_either_names_the_local_rank(local: dict[str, str]) -> None:
    found = discover({"PMI_RANK": "3", "PMI_SIZE": "4", **local})
    assert (found.local_rank, found.local_world_size) == (1, 2)


@pytest.mark.parametrize(
    ("environ", "sign"),
    [(PMIX, "PMIX_RANK"), ({"PMI_RANK": "1"}, "PMI_RANK"), ({"PALS_RANKID": "1", "PALS_APID": "1"}, "PALS_RANKID")],
)
def test_without_the_size_only_mpi_can_tell(environ: dict[str, str], sign: str) -> None:
    assert discover(environ).launcher == "none"
    assert mpi_launcher(environ) == sign
