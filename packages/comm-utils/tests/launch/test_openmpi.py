"""``mpirun`` of Open MPI; test_recorded.py has the variables of a real one."""

from __future__ import annotations

import pytest

from comm_utils import LaunchError
from comm_utils.launch import LaunchInfo, discover
from comm_utils.launch.ports import derived_port

# https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html, rank 3 of 4 on two hosts. The second job of the
# same user on that host is what makes the "node rank" differ from the local rank.
PROCESS = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "5",
    "OMPI_UNIVERSE_SIZE": "4",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-node01-4711@1",
}


def test_several_hosts() -> None:
    assert discover(PROCESS) == LaunchInfo(
        "openmpi",
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        master_port=derived_port("prterun-node01-4711@1"),
        job_id="prterun-node01-4711@1",
        sources={
            "rank": "environment variable OMPI_COMM_WORLD_RANK",
            "world_size": "environment variable OMPI_COMM_WORLD_SIZE",
            "local_rank": "environment variable OMPI_COMM_WORLD_LOCAL_RANK",
            "local_world_size": "environment variable OMPI_COMM_WORLD_LOCAL_SIZE",
            "master_port": "derived from environment variable PMIX_NAMESPACE",
            "job_id": "environment variable PMIX_NAMESPACE",
        },
    )


@pytest.mark.parametrize("size", ["1", "4"])
def test_one_host(size: str) -> None:
    one = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": size, "OMPI_COMM_WORLD_LOCAL_SIZE": size}
    found = discover({**PROCESS, **one, "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert (found.master_addr, found.node_rank) == ("127.0.0.1", 0)
    assert found.sources["master_addr"] == "all ranks are on this host"


def test_one_rank_is_on_one_host() -> None:
    found = discover({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"})
    assert (found.master_addr, found.node_rank, found.local_rank) == ("127.0.0.1", 0, None)


def test_version_4_names_the_job_twice() -> None:
    # https://github.com/open-mpi/ompi/blob/v4.1.x/orte/mca/schizo/ompi/schizo_ompi.c
    version_4 = {**PROCESS, "PMIX_NAMESPACE": "1342046209", "OMPI_MCA_ess_base_jobid": "1342046209"}
    assert discover(version_4).job_id == "1342046209"
    del version_4["PMIX_NAMESPACE"]
    assert discover(version_4).job_id == "1342046209"


@pytest.mark.parametrize("missing", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"])
def test_not_all_there(missing: str) -> None:
    assert discover({name: value for name, value in PROCESS.items() if name != missing}).launcher == "none"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"OMPI_COMM_WORLD_RANK": "x"}, "environment variable OMPI_COMM_WORLD_RANK: got 'x'; expected an integer"),
        ({"OMPI_COMM_WORLD_RANK": "4"}, r"rank: got 4 \(environment variable OMPI_COMM_WORLD_RANK\); expected 0 to 3"),
        (
            {"OMPI_COMM_WORLD_LOCAL_SIZE": "5"},
            r"local world size: got 5 \(.*\); expected at most the world size of 4 \(",
        ),
    ],
)
def test_contradictions_inside(changes: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        discover({**PROCESS, **changes})
