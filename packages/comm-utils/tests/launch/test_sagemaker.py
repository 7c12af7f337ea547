"""Training jobs of Amazon SageMaker."""

from __future__ import annotations

import pytest

from comm_utils import LaunchError
from comm_utils.launch import LaunchInfo, discover
from comm_utils.launch.ports import derived_port

# https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
HOST = {
    "SM_CURRENT_HOST": "algo-2",
    "SM_HOSTS": '["algo-1","algo-2","algo-3"]',
    "SM_NETWORK_INTERFACE_NAME": "eth0",
    "SM_NUM_GPUS": "1",
    "SM_TRAINING_ENV": "{}",
    "TRAINING_JOB_NAME": "pytorch-training-1",
}
# Rank 5 of 6. The toolkit's mpirun passes the first host's variables on (its mpi.py: "-x" for each).
MPI = {
    **HOST,
    "SM_CURRENT_HOST": "algo-1",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_one_process_a_host() -> None:
    assert discover(HOST) == LaunchInfo(
        "sagemaker",
        rank=1,
        world_size=3,
        local_rank=0,
        local_world_size=1,
        node_rank=1,
        master_addr="algo-1",
        master_port=derived_port("pytorch-training-1"),
        job_id="pytorch-training-1",
        sources={
            "rank": "position of SM_CURRENT_HOST in SM_HOSTS",
            "world_size": "number of hosts in SM_HOSTS",
            "local_rank": "one process per host",
            "local_world_size": "one process per host",
            "node_rank": "position of SM_CURRENT_HOST in SM_HOSTS",
            "master_addr": "first host of SM_HOSTS",
            "master_port": "derived from environment variable TRAINING_JOB_NAME",
            "job_id": "environment variable TRAINING_JOB_NAME",
        },
    )


def test_mpirun_says_the_ranks_and_sagemaker_the_first_host() -> None:
    found = discover(MPI)
    assert (found.launcher, found.rank, found.world_size) == ("sagemaker", 5, 6)
    assert (found.local_rank, found.local_world_size, found.node_rank) == (1, 2, None)
    assert (found.master_addr, found.sources["master_addr"]) == ("algo-1", "first host of SM_HOSTS")
    assert found.sources["rank"] == "environment variable OMPI_COMM_WORLD_RANK"


@pytest.mark.parametrize("environ", [{}, MPI])
def test_one_host(environ: dict[str, str]) -> None:
    one = {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}
    found = discover({**environ, **one, "OMPI_COMM_WORLD_LOCAL_SIZE": "6"} if environ else one)
    assert (found.launcher, found.node_rank, found.master_addr) == ("sagemaker", 0, "127.0.0.1")


def test_the_order_is_that_of_the_list() -> None:
    hosts = '["algo-1", "algo-10", "algo-2"]'
    assert discover({**HOST, "SM_HOSTS": hosts}).rank == 2
    assert discover({**HOST, "SM_HOSTS": hosts, "SM_CURRENT_HOST": "algo-10"}).rank == 1


@pytest.mark.parametrize("environ", [HOST, {**MPI, "PMIX_NAMESPACE": "1342046209"}])
def test_the_address_of_the_python_sdk(environ: dict[str, str]) -> None:
    # https://github.com/aws/sagemaker-python-sdk, sagemaker/modules/train/container_drivers
    found = discover({**environ, "SM_MASTER_ADDR": "algo-1.example", "SM_MASTER_PORT": "7777"})
    assert (found.master_addr, found.master_port) == ("algo-1.example", 7777)
    assert found.sources["master_port"] == "environment variable SM_MASTER_PORT"


def test_torchrun_on_sagemaker() -> None:
    assert discover({**HOST, "RANK": "0", "WORLD_SIZE": "2"}).launcher == "environment"


@pytest.mark.parametrize("hosts", ["", "algo-1", "[]", '{"a": 1}', "[1]", '[""]', "null"])
def test_malformed_hosts(hosts: str) -> None:
    with pytest.raises(LaunchError, match=r"environment variable SM_HOSTS: got .*; expected a JSON list of hosts"):
        discover({**HOST, "SM_HOSTS": hosts})


def test_a_host_that_is_not_in_the_list() -> None:
    with pytest.raises(LaunchError, match="SM_CURRENT_HOST: got 'algo-9'; expected one of SM_HOSTS, algo-1, algo-2"):
        discover({**HOST, "SM_CURRENT_HOST": "algo-9"})
    with pytest.raises(LaunchError, match="SM_CURRENT_HOST: it is not set; expected one of SM_HOSTS"):
        discover({"SM_HOSTS": '["algo-1"]'})
