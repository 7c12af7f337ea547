"""What only ``deepspeed.comm`` has, and what only ``torch.distributed`` has."""

from __future__ import annotations

import logging
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import comm_orchestrator as dist
from comm_orchestrator import facade
from comm_utils.launch.ports import derived_port

#: Of an MPI job of AzureML on two nodes, as in packages/comm-utils/tests/launch/test_azureml.py.
AZUREML = {
    "AZUREML_EXPERIMENT_ID": "6c2b9f4e-0000-0000-0000-000000000000",
    "AZUREML_RUN_ID": "calm_turnip_x7",
    "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
    "AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.5",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
ONE_NODE = {
    "AZUREML_EXPERIMENT_ID": "6c2b9f4e-0000-0000-0000-000000000000",
    "AZ_BATCHAI_MPI_MASTER_NODE": "localhost",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
#: Of a SageMaker job of three hosts, started by mpirun, as in test_sagemaker.py beside it.
SAGEMAKER = {
    "SM_CURRENT_HOST": "algo-1",
    "SM_HOSTS": '["algo-1","algo-2","algo-3"]',
    "SM_TRAINING_ENV": "{}",
    "TRAINING_JOB_NAME": "pytorch-training-1",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
HAS = ["has_all_gather_into_tensor", "has_reduce_scatter_tensor", "has_all_reduce_coalesced", "has_coalescing_manager"]
NOT_INITIALISED = "the distributed environment is not initialised; call comm_orchestrator.init_distributed() first"


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of this process, nearly none, put back afterwards."""
    mine = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    replaced: dict[str, str] = dict(mine)
    monkeypatch.setattr(os, "environ", replaced)
    return replaced


@pytest.fixture
def world(environ: dict[str, str]) -> Iterator[None]:
    """A world of one rank."""
    dist.init_distributed("gloo", verbose=False)
    try:
        yield
    finally:
        dist.destroy_process_group()


# --- has_*


@pytest.mark.parametrize("name", HAS)
def test_everything_is_there(world: None, name: str) -> None:
    assert getattr(dist, name)() is True


@pytest.mark.parametrize("name", HAS)
def test_nothing_is_there_before_initialisation(name: str) -> None:
    with pytest.raises(dist.NotInitializedError) as raised:
        getattr(dist, name)()
    assert str(raised.value) == f"{name}: {NOT_INITIALISED}"


# --- where this process runs


@pytest.mark.parametrize(
    ("name", "variables"),
    [("in_aml", AZUREML), ("in_aws_sm", SAGEMAKER), ("in_dlts", {"DLTS_JOB_ID": "application_1"})],
)
def test_services(environ: dict[str, str], name: str, variables: dict[str, str]) -> None:
    assert getattr(dist, name)() is False
    environ.update(variables)
    assert getattr(dist, name)() is True
    assert sum([dist.in_aml(), dist.in_aws_sm(), dist.in_dlts()]) == 1


def from_launcher() -> tuple[int, int, int]:
    return dist.get_world_rank_from_launcher(), dist.get_local_rank_from_launcher(), dist.get_world_size_from_launcher()


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, (0, 0, 1)),
        (TORCHRUN, (3, 1, 4)),
        (AZUREML, (3, 1, 4)),
        (SAGEMAKER, (5, 1, 6)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 0, 2)),
        ({"LOCAL_RANK": "3"}, (0, 3, 1)),
        ({"RANK": "1"}, (1, 0, 1)),
        ({"WORLD_SIZE": "4"}, (0, 0, 4)),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, (0, 2, 1)),
        ({"OMPI_COMM_WORLD_RANK": "1"}, (1, 0, 1)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "LOCAL_RANK": "0"}, (1, 0, 4)),
    ],
    ids=[
        *("nobody", "torchrun", "azureml", "sagemaker", "no-local-rank"),
        *("local-rank", "rank", "world-size", "local-rank-of-openmpi", "rank-of-openmpi", "mixed"),
    ],
)
def test_what_the_launcher_says(
    environ: dict[str, str], variables: dict[str, str], found: tuple[int, int, int]
) -> None:
    environ.update(variables)
    assert from_launcher() == found
    assert not dist.is_initialized()


def test_what_the_launcher_says_is_no_number(environ: dict[str, str]) -> None:
    environ.update({**TORCHRUN, "RANK": "three"})
    with pytest.raises(dist.LaunchError, match="RANK"):
        dist.get_world_rank_from_launcher()
    environ["LOCAL_RANK"] = "x"
    with pytest.raises(dist.LaunchError, match="environment variable LOCAL_RANK: got 'x'; expected an integer"):
        dist.get_local_rank_from_launcher()


# --- variables that are set


def launch_variables(environ: dict[str, str]) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: environ[name] for name in names if name in environ}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What is logged, from level INFO."""
    monkeypatch.setattr(logging.getLogger("comm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="comm")
    return caplog


def test_azureml(environ: dict[str, str], lines: pytest.LogCaptureFixture) -> None:
    environ.update(AZUREML)
    dist.patch_aml_env_for_torch_nccl_backend()
    assert launch_variables(environ) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.4",
        "MASTER_PORT": str(derived_port("calm_turnip_x7")),
    }
    assert "NCCL_SOCKET_IFNAME" not in environ
    (line,) = lines.messages
    assert line.startswith("from AzureML: RANK=3, WORLD_SIZE=4, ")
    assert from_launcher() == (3, 1, 4)


def test_azureml_on_one_node(environ: dict[str, str], lines: pytest.LogCaptureFixture) -> None:
    environ.update(ONE_NODE)
    dist.patch_aml_env_for_torch_nccl_backend(master_port=6106, verbose=False)
    found = launch_variables(environ)
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("1", "2", "127.0.0.1")
    assert found["MASTER_PORT"] == "6106"
    assert lines.messages == []


def test_a_port_that_is_set_stays(environ: dict[str, str]) -> None:
    environ.update({**AZUREML, "MASTER_PORT": "4321"})
    dist.patch_aml_env_for_torch_nccl_backend(master_port=6106)
    assert environ["MASTER_PORT"] == "4321"


def test_sagemaker(environ: dict[str, str], lines: pytest.LogCaptureFixture) -> None:
    environ.update(SAGEMAKER)
    dist.patch_aws_sm_env_for_torch_nccl_backend()
    assert launch_variables(environ) == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "algo-1",
        "MASTER_PORT": str(derived_port("pytorch-training-1")),
    }
    (line,) = lines.messages
    assert line.startswith("from SageMaker: RANK=5, WORLD_SIZE=6, ")
    assert from_launcher() == (5, 1, 6)


@pytest.mark.parametrize(
    ("name", "variables", "missing"),
    [
        ("patch_aml_env_for_torch_nccl_backend", {}, "AZUREML_EXPERIMENT_ID"),
        ("patch_aml_env_for_torch_nccl_backend", SAGEMAKER, "AZUREML_EXPERIMENT_ID"),
        ("patch_aml_env_for_torch_nccl_backend", {"AZUREML_EXPERIMENT_ID": "1"}, "the variables of an MPI launcher"),
        ("patch_aws_sm_env_for_torch_nccl_backend", {}, "SM_HOSTS and SM_CURRENT_HOST"),
        ("patch_aws_sm_env_for_torch_nccl_backend", AZUREML, "SM_HOSTS and SM_CURRENT_HOST"),
    ],
)
def test_another_place(environ: dict[str, str], name: str, variables: dict[str, str], missing: str) -> None:
    environ.update(variables)
    before = dict(environ)
    with pytest.raises(dist.LaunchError) as raised:
        getattr(dist, name)()
    assert str(raised.value).startswith(f"{name}: this is no ")
    assert missing in str(raised.value)
    assert "init_distributed() works without this call" in str(raised.value)
    assert environ == before


# --- MPI


@pytest.mark.parametrize("variables", [{}, TORCHRUN], ids=["nobody", "torchrun"])
def test_no_mpi_launcher(environ: dict[str, str], variables: dict[str, str]) -> None:
    environ.update(variables)
    before = dict(environ)
    with pytest.raises(dist.LaunchError, match=r"^mpi_discovery: no MPI launcher started this process") as raised:
        dist.mpi_discovery()
    assert "mpirun" in str(raised.value)
    assert "init_distributed() needs no MPI" in str(raised.value)
    assert environ == before


class Communicator:
    """Rank 2 of 4, two to a host."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Split_type(self, kind: object) -> Communicator:
        return Communicator(0, 2)

    def bcast(self, value: object, root: int) -> tuple[str, int]:
        assert value is None
        return "10.0.0.7", 4000

    def Free(self) -> None: ...


def test_mpi(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture) -> None:
    """With a stand-in for mpi4py; the real one is tested by starting mpirun."""
    package = types.ModuleType("mpi4py")
    package.MPI = types.SimpleNamespace(COMM_WORLD=Communicator(2, 4), COMM_TYPE_SHARED=0)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setattr("comm_orchestrator.mpi.is_installed", lambda: True)
    environ["OMPI_COMM_WORLD_RANK"] = "2"
    dist.mpi_discovery(distributed_port=4000)
    assert launch_variables(environ) == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "4000",
    }
    assert [line.split(":")[0] for line in lines.messages] == ["from MPI"]


# --- symmetric memory


def test_symmetric_memory_that_torch_lacks(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", None)
    with pytest.raises(dist.BackendUnavailableError) as raised:
        dist.enable_symm_mem_for_group("0")
    text = f"enable_symm_mem_for_group: this build of torch ({torch.__version__}) has no symmetric memory: "
    assert str(raised.value).startswith(text)


def test_symmetric_memory_that_torch_has(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    module: Any = types.ModuleType("torch.distributed._symmetric_memory")
    module.enable_symm_mem_for_group = asked.append
    monkeypatch.setitem(sys.modules, module.__name__, module)
    dist.enable_symm_mem_for_group("group-1")
    assert asked == ["group-1"]


# --- names of torch.distributed


@pytest.mark.parametrize("name", ["is_gloo_available", "get_node_local_rank", "Work", "P2POp", "all_reduce"])
def test_what_both_have_is_ours(name: str) -> None:
    assert getattr(dist, name) is (getattr(facade, name) if name in dist.__all__ else getattr(c10d, name))
    assert (name in dist.__all__) == (name in ("Work", "P2POp", "all_reduce"))


@pytest.mark.parametrize("name", ["TCPStore", "ProcessGroup", "is_gloo_available", "get_node_local_rank", "DebugLevel"])
def test_names_of_torch_are_handed_on(name: str) -> None:
    assert getattr(dist, name) is getattr(c10d, name)


def test_functions_of_torch_work(environ: dict[str, str]) -> None:
    assert dist.is_gloo_available() is True
    environ["LOCAL_RANK"] = "3"
    assert dist.get_node_local_rank() == 3
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_every_name_of_torch_that_is_not_ours_is_torchs_own() -> None:
    import warnings

    import torch.distributed as c10d

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of names that it deprecates
        handed_on = [name for name in dir(c10d) if not name.startswith("_") and name not in dist.__all__]
        assert "rendezvous" in handed_on
        assert [name for name in handed_on if getattr(dist, name) is not getattr(c10d, name)] == []


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_code_that_asks_before_the_start_catches_what_torch_raises(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="get_rank"):
        dist.get_rank()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("all_reduced", ", and torch.distributed has none"),
        ("cdb", ", and torch.distributed has none"),
        ("_no_such_name", ""),
        ("__wrapped__", ""),
        (
            "_rank_not_in_group",
            ": private names of torch.distributed are not handed on; use torch.distributed._rank_not_in_group",
        ),
        (
            "_coalescing_manager",
            ": private names of torch.distributed are not handed on; use coalescing() or "
            "torch.distributed._coalescing_manager",
        ),
    ],
)
def test_names_that_are_not_there(name: str, reason: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(dist, name)
    assert str(raised.value) == f"module 'comm_orchestrator' has no attribute {name!r}{reason}"
    assert not hasattr(dist, name)
