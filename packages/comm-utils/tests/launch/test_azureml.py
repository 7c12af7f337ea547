"""MPI jobs of Azure Machine Learning."""

from __future__ import annotations

import pytest

from comm_utils.launch import LaunchInfo, discover

# https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu (Open MPI's variables),
# https://azure.github.io/azureml-web/docs/cheatsheet/distributed-training/ (the first node's)
SINGLE_NODE = {
    "AZUREML_EXPERIMENT_ID": "6c2b9f4e-0000-0000-0000-000000000000",
    "AZUREML_RUN_ID": "calm_turnip_x7",
    "AZ_BATCHAI_MPI_MASTER_NODE": "localhost",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
# https://learn.microsoft.com/azure/batch/batch-compute-node-environment-variables: the port is reserved for the service
SEVERAL_NODES = {
    **SINGLE_NODE,
    "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
    "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.5",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
}


def test_several_nodes() -> None:
    found = discover(SEVERAL_NODES)
    assert found == LaunchInfo(
        "azureml",
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        master_addr="10.0.0.4",
        master_port=found.master_port,
        job_id="calm_turnip_x7",
        sources={
            "rank": "environment variable OMPI_COMM_WORLD_RANK",
            "world_size": "environment variable OMPI_COMM_WORLD_SIZE",
            "local_rank": "environment variable OMPI_COMM_WORLD_LOCAL_RANK",
            "local_world_size": "environment variable OMPI_COMM_WORLD_LOCAL_SIZE",
            "master_addr": "environment variable AZ_BATCH_MASTER_NODE",
            "master_port": "derived from environment variable AZUREML_RUN_ID",
            "job_id": "environment variable AZUREML_RUN_ID",
        },
    )
    assert found.master_port != 6000


@pytest.mark.parametrize(
    ("missing", "address"), [("AZ_BATCH_MASTER_NODE", "10.0.0.5"), ("AZ_BATCHAI_MPI_MASTER_NODE", "10.0.0.4")]
)
def test_either_variable_names_the_first_node(missing: str, address: str) -> None:
    assert discover({name: value for name, value in SEVERAL_NODES.items() if name != missing}).master_addr == address


def test_the_port_may_be_absent() -> None:
    assert discover({**SEVERAL_NODES, "AZ_BATCH_MASTER_NODE": "10.0.0.4"}).master_addr == "10.0.0.4"


def test_one_node() -> None:
    found = discover(SINGLE_NODE)
    assert (found.launcher, found.rank, found.world_size, found.node_rank) == ("azureml", 1, 2, 0)
    assert (found.master_addr, found.sources["master_addr"]) == ("127.0.0.1", "all ranks are on this host")


def test_an_image_with_intel_mpi() -> None:
    hydra = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "I_MPI_HYDRA_UUID": "u"}
    azure = {name: value for name, value in SEVERAL_NODES.items() if not name.startswith("OMPI")}
    found = discover({**azure, **hydra})
    assert (found.launcher, found.rank, found.master_addr, found.job_id) == ("azureml", 3, "10.0.0.4", "u")


def test_a_job_of_the_pytorch_kind() -> None:
    torch = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105"}
    found = discover({"AZUREML_EXPERIMENT_ID": "1", "NODE_RANK": "1", **torch})
    assert (found.launcher, found.rank, found.master_port) == ("environment", 1, 6105)


def test_a_job_without_mpi() -> None:
    assert discover({"AZUREML_EXPERIMENT_ID": "1", "AZUREML_RUN_ID": "r"}).launcher == "none"
