"""The order in which launchers are asked."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from comm_utils import LaunchError
from comm_utils.launch import LAUNCHERS, LaunchInfo, discover, mpi_launcher

OPENMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"}
AZUREML = {"AZUREML_EXPERIMENT_ID": "1234"}
KUBERNETES = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "1"}
USER = {"RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize("environ", [{}, {"LOCAL_RANK": "3", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "x"}])
def test_nobody(environ: dict[str, str]) -> None:
    found = discover(environ)
    assert found.launcher == "none"
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size, found.node_rank) == (0, 1, 0, 1, 0)
    assert (found.master_addr, found.master_port, found.job_id) == (None, None, None)
    assert set(found.sources.values()) == {"default: no launcher was found"}


def test_a_single_process_is_asked_for_last() -> None:
    names = [name for name, _ in LAUNCHERS]
    assert names[-1] == "single"
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (USER | OPENMPI | SRUN | SAGEMAKER | KUBERNETES, "environment"),
        (USER | SRUN | {"TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
        (KUBERNETES | SRUN, "kubernetes"),
        (KUBERNETES | OPENMPI, "openmpi"),
        (AZUREML | OPENMPI | SRUN, "azureml"),
        (AZUREML | SRUN, "slurm"),
        (AZUREML, "none"),
        (SAGEMAKER | OPENMPI, "sagemaker"),
        (SAGEMAKER, "sagemaker"),
        (SRUN | OPENMPI, "openmpi"),
        (SRUN | HYDRA, "mpich"),
        (SRUN | HYDRA | {"I_MPI_HYDRA_UUID": "1"}, "intel_mpi"),
        (SRUN | {"PMI_RANK": "1", "PMI_SIZE": "2"}, "slurm"),
        (SRUN | {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.7.0"}, "slurm"),
        # The PMIx library of Slurm's daemon may set Open MPI's variables.
        (SRUN | OPENMPI | {"PMIX_NAMESPACE": "slurm.pmix.7.0"}, "slurm"),
        (SRUN | HYDRA | {"PMIX_NAMESPACE": "slurm.pmix.7.0"}, "mpich"),
        # prterun or prun started a program that is not MPI's, from within a step.
        (SRUN | {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-node01-7@1", "PRTE_LAUNCHED": "1"}, "none"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "pmi"),
        ({"PMIX_RANK": "1"}, "none"),
    ],
)
def test_who_is_believed(environ: dict[str, str], launcher: str) -> None:
    before = dict(environ)
    assert discover(environ).launcher == launcher
    assert before == environ


@pytest.mark.parametrize(
    "environ",
    [OPENMPI, HYDRA, SRUN, SAGEMAKER, AZUREML | OPENMPI, KUBERNETES, {"PMI_RANK": "1", "PMI_SIZE": "2"}],
)
def test_an_address_that_the_user_sets_wins(environ: dict[str, str]) -> None:
    found = discover({**environ, "MASTER_ADDR": "mine.example", "MASTER_PORT": "4711"})
    assert (found.master_addr, found.master_port) == ("mine.example", 4711)
    assert found.sources["master_addr"] == "environment variable MASTER_ADDR"
    assert found.sources["master_port"] == "environment variable MASTER_PORT"


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({}, None),
        (SRUN | USER | KUBERNETES | SAGEMAKER | {"I_MPI_ROOT": "/opt", "PMI_FD": "9"}, None),
        (OPENMPI, "OMPI_COMM_WORLD_RANK"),
        (HYDRA, "PMI_RANK"),
        # Hydra with its option -pmi-port sets no PMI_RANK.
        ({"MPI_LOCALRANKID": "0", "PMI_ID": "0"}, "MPI_LOCALRANKID"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK"),
        ({"PALS_RANKID": "0"}, "PALS_RANKID"),
        ({"MV2_COMM_WORLD_RANK": "0"}, "MV2_COMM_WORLD_RANK"),
    ],
)
def test_signs_of_mpi(environ: dict[str, str], variable: str | None) -> None:
    assert mpi_launcher(environ) == variable


def test_launchers_may_be_given() -> None:
    def mine(environ: Mapping[str, str]) -> LaunchInfo | None:
        return LaunchInfo("mine", 3, 4) if "MINE" in environ else None

    launchers = (("mine", mine), *LAUNCHERS)
    assert discover({"MINE": "1", **USER}, launchers).launcher == "mine"
    assert discover(USER, launchers).launcher == "environment"


def test_errors_end_the_search() -> None:
    with pytest.raises(LaunchError, match="environment variable WORLD_SIZE: got 'x'"):
        discover({"RANK": "0", "WORLD_SIZE": "x", **OPENMPI})


@pytest.mark.parametrize("alone", [{"WORLD_SIZE": "8"}, {"RANK": "3"}])
def test_half_of_torchruns_pair_leaves_the_launcher_its_turn(alone: dict[str, str]) -> None:
    """As where a batch script exports WORLD_SIZE and MASTER_ADDR before srun."""
    assert discover({**alone, **SRUN}) == discover(SRUN)
