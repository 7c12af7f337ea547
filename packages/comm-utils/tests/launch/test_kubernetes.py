"""Training operators of Kubernetes."""

from __future__ import annotations

import pytest

from comm_utils import LaunchError
from comm_utils.launch import LaunchInfo, discover

# https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/torch/torch.go, node 1 of 3
POD = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}


def test_one_process_per_node() -> None:
    assert discover(POD) == LaunchInfo(
        "kubernetes",
        rank=1,
        world_size=3,
        local_rank=0,
        local_world_size=1,
        node_rank=1,
        master_addr="job-node-0-0.job",
        master_port=29500,
        sources={
            "rank": "environment variable PET_NODE_RANK",
            "world_size": "environment variable PET_NNODES",
            "local_rank": "one process per node",
            "local_world_size": "environment variable PET_NPROC_PER_NODE",
            "node_rank": "environment variable PET_NODE_RANK",
            "master_addr": "environment variable PET_MASTER_ADDR",
            "master_port": "environment variable PET_MASTER_PORT",
        },
    )


def test_what_is_absent_is_torchruns_default() -> None:
    found = discover({"PET_NODE_RANK": "0"})
    assert (found.launcher, found.rank, found.world_size, found.local_world_size) == ("kubernetes", 0, 1, 1)
    assert found.sources["world_size"] == "default of PET_NNODES"
    assert found.sources["local_world_size"] == "default of PET_NPROC_PER_NODE"
    found = discover({"PET_NNODES": "1"})
    assert (found.rank, found.sources["rank"]) == (0, "default of PET_NODE_RANK")


def test_a_range_of_one_number_is_that_number() -> None:
    assert discover({**POD, "PET_NNODES": "3:3"}).world_size == 3


def test_a_rendezvous_has_an_id() -> None:
    found = discover({"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_RDZV_ID": "job-7"})
    assert found.job_id == "job-7"
    assert found.sources["master_port"] == "derived from environment variable PET_RDZV_ID"


def test_torchrun_in_the_pod() -> None:
    found = discover({**POD, "PET_NPROC_PER_NODE": "auto", "RANK": "5", "WORLD_SIZE": "6", "TORCHELASTIC_RUN_ID": "x"})
    assert (found.launcher, found.rank, found.world_size) == ("torchrun", 5, 6)


def test_defaults_for_torchrun_alone_are_no_sign() -> None:
    assert discover({"PET_NPROC_PER_NODE": "4", "PET_STANDALONE": "1"}).launcher == "none"


@pytest.mark.parametrize("processes", ["auto", "gpu", "cpu", "4", "0", ""])
def test_several_processes_per_node_need_torchrun(processes: str) -> None:
    message = f"PET_NPROC_PER_NODE: got '{processes}', but this is one process per node; start the script with torchrun"
    with pytest.raises(LaunchError, match=message):
        discover({**POD, "PET_NPROC_PER_NODE": processes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"PET_NNODES": "1:4"}, "PET_NNODES: got '1:4', a number of nodes that may change; start .* with torchrun"),
        ({"PET_NNODES": "x"}, "environment variable PET_NNODES: got 'x'; expected an integer"),
        ({"PET_NNODES": "x:x"}, "environment variable PET_NNODES: got 'x:x'; expected an integer"),
        ({"PET_NODE_RANK": "3"}, r"rank: got 3 \(environment variable PET_NODE_RANK\); expected 0 to 2"),
        ({"PET_MASTER_PORT": "http"}, "environment variable PET_MASTER_PORT: got 'http'; expected an integer"),
    ],
)
def test_values_that_cannot_be(changes: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        discover({**POD, **changes})


def test_several_nodes_and_no_index() -> None:
    with pytest.raises(
        LaunchError, match=r"PET_NNODES is set to '2' but PET_NODE_RANK is not set; set it to the index"
    ):
        discover({"PET_NNODES": "2"})
