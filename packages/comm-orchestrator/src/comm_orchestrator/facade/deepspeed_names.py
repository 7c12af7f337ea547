"""Functions that only ``deepspeed.comm`` has, by its names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, overload

import torch

import comm_collectives
from comm_collectives import arguments
from comm_collectives.annotations import Group, Op, Timeout
from comm_collectives.collective import INLINE, collective
from comm_orchestrator import mpi, rank_discovery
from comm_utils.backend import Work
from comm_utils.errors import BackendUnavailableError, LaunchError
from comm_utils.launch import LaunchInfo, azureml, discover, mpi_launcher, sagemaker, with_plugins
from comm_utils.launch.info import integer
from comm_utils.log import logger

__all__ = [
    "allgather_fn",
    "enable_symm_mem_for_group",
    "get_local_rank_from_launcher",
    "get_world_rank_from_launcher",
    "get_world_size_from_launcher",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "in_aml",
    "in_aws_sm",
    "in_dlts",
    "mpi_discovery",
    "patch_aml_env_for_torch_nccl_backend",
    "patch_aws_sm_env_for_torch_nccl_backend",
    "reduce_scatter_fn",
]


@overload
def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    timeout: Timeout = None,
) -> None: ...
@overload
def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: Literal[True] = ...,
    *,
    timeout: Timeout = None,
) -> Work: ...
@overload
def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None: ...
@collective(compiled=INLINE)
def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """:func:`reduce_scatter_tensor` by DeepSpeed's name.

    Args:
        output_tensor, tensor, op: as for :func:`reduce_scatter_tensor`, whose ``input`` is ``tensor``.
    """
    return comm_collectives.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op, timeout=timeout)


@overload
def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    timeout: Timeout = None,
) -> None: ...
@overload
def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: Literal[True] = ...,
    *,
    timeout: Timeout = None,
) -> Work: ...
@overload
def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None: ...
@collective(compiled=INLINE)
def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """:func:`all_gather_into_tensor` by DeepSpeed's name.

    Args:
        output_tensor, input_tensor: as for :func:`all_gather_into_tensor`.
    """
    return comm_collectives.all_gather_into_tensor(output_tensor, input_tensor, group, async_op, timeout=timeout)


def has_all_gather_into_tensor() -> bool:
    """Return True: every backend has it, or gets it built.

    Raises:
        NotInitializedError: nothing is initialised.
    """
    return _true("has_all_gather_into_tensor")


def has_reduce_scatter_tensor() -> bool:
    """Return True: every backend has it, or gets it built.

    Raises:
        NotInitializedError: nothing is initialised.
    """
    return _true("has_reduce_scatter_tensor")


def has_all_reduce_coalesced() -> bool:
    """Return True: every backend has it, or gets it built.

    Raises:
        NotInitializedError: nothing is initialised.
    """
    return _true("has_all_reduce_coalesced")


def has_coalescing_manager() -> bool:
    """Return True: ``all_gather_coalesced`` works on every backend.

    Raises:
        NotInitializedError: nothing is initialised.
    """
    return _true("has_coalescing_manager")


def _true(call: str) -> bool:
    arguments.active(call)
    return True


def enable_symm_mem_for_group(group_name: str) -> None:
    """Enable torch's symmetric memory for the group called ``group_name``, where this build of torch has it.

    Args:
        group_name: ``group.group_name`` of a process group.

    Raises:
        BackendUnavailableError: it has not.
        NotInitializedError: nothing is initialised.
    """
    arguments.active("enable_symm_mem_for_group")
    try:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group as enable
    except ImportError as error:
        raise BackendUnavailableError(
            f"enable_symm_mem_for_group: this build of torch ({torch.__version__}) has no symmetric memory: {error}"
        ) from error
    enable(group_name)  # type: ignore[arg-type]  # a NewType of newer torch


def get_local_rank_from_launcher() -> int:
    """Return ``LOCAL_RANK``, else what the launcher's variables say; 0 where there are none. Needs no initialisation.

    Raises:
        LaunchError: the variable is no integer, or the launcher's variables contradict each other.
    """
    return _from_launcher("local_rank", "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")


def get_world_rank_from_launcher() -> int:
    """Return ``RANK``, else what the launcher's variables say; 0 where there are none. Needs no initialisation.

    Raises:
        LaunchError: the variable is no integer, or the launcher's variables contradict each other.
    """
    return _from_launcher("rank", "RANK", "OMPI_COMM_WORLD_RANK")


def get_world_size_from_launcher() -> int:
    """Return ``WORLD_SIZE``, else what the launcher's variables say; 1 where there are none. Needs no initialisation.

    Raises:
        LaunchError: the variable is no integer, or the launcher's variables contradict each other.
    """
    return _from_launcher("world_size", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")


def _from_launcher(field: str, *variables: str) -> int:
    """Return the first of DeepSpeed's ``variables`` that is set, else ``field`` of what a launcher says."""
    for variable in variables:
        if variable in os.environ:
            return integer(os.environ, variable)
    # RANK or WORLD_SIZE alone, or without LOCAL_RANK, say nothing about this field.
    others = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    found: int | None = getattr(discover(others, with_plugins()), field)
    return found or 0


def mpi_discovery(distributed_port: int = 29500, verbose: bool = True) -> None:
    """Ask MPI who this process is, and set ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``.

    Called by all processes that an MPI launcher started. ``init_distributed`` does what is needed of it by itself, and
    leaves no variables behind where it fails.

    Args:
        distributed_port: that rank 0 is to listen on.
        verbose: log what was found.

    Raises:
        LaunchError: no MPI launcher started this process, or mpi4py is missing (extra ``[mpi]``).
    """
    variable = mpi_launcher(os.environ)
    if variable is None:
        raise LaunchError(
            "mpi_discovery: no MPI launcher started this process, as far as its environment shows; start it with "
            "mpirun, or leave the call out: init_distributed() needs no MPI"
        )
    _set(mpi.discover(variable, distributed_port), {"MASTER_PORT": str(distributed_port)}, "MPI", verbose)


def in_aml() -> bool:
    """Return whether this process runs in an Azure Machine Learning job."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm() -> bool:
    """Return whether this process runs in a SageMaker training job."""
    return "SM_TRAINING_ENV" in os.environ


def in_dlts() -> bool:
    """Return whether this process runs on a DLTS cluster."""
    return "DLTS_JOB_ID" in os.environ


def patch_aml_env_for_torch_nccl_backend(master_port: int = 6105, verbose: bool = True) -> None:
    """Set ``RANK`` and the others from the variables of an Azure Machine Learning job; see :func:`mpi_discovery`.

    Unlike DeepSpeed's, it leaves ``NCCL_SOCKET_IFNAME`` alone: ``init_distributed`` chooses the interface.

    Args:
        verbose: log what was found.
        master_port: for several nodes, where neither ``MASTER_PORT`` nor the job says one.

    Raises:
        LaunchError: the variables are not there.
    """
    launch = azureml.discover(os.environ)
    if launch is None:
        raise LaunchError(
            "patch_aml_env_for_torch_nccl_backend: this is no AzureML job that MPI started: AZUREML_EXPERIMENT_ID or "
            "the variables of an MPI launcher are missing; init_distributed() works without this call anywhere"
        )
    _set(launch, {"MASTER_PORT": str(launch.master_port or master_port)}, "AzureML", verbose)


def patch_aws_sm_env_for_torch_nccl_backend(verbose: bool = True) -> None:
    """Set ``RANK`` and the others from the variables of a SageMaker job; see :func:`mpi_discovery`.

    Unlike DeepSpeed's, it sets ``MASTER_ADDR`` too.

    Args:
        verbose: log what was found.

    Raises:
        LaunchError: the variables are not there.
    """
    launch = sagemaker.discover(os.environ)
    if launch is None:
        raise LaunchError(
            "patch_aws_sm_env_for_torch_nccl_backend: this is no SageMaker job: SM_HOSTS and SM_CURRENT_HOST are "
            "missing; init_distributed() works without this call anywhere"
        )
    _set(launch, {}, "SageMaker", verbose)


def _set(launch: LaunchInfo, more: Mapping[str, str], source: str, verbose: bool) -> None:
    found = {**rank_discovery.variables(launch, {}), **more}
    os.environ.update(found)
    if verbose:
        logger.info("from %s: %s", source, ", ".join(f"{name}={value}" for name, value in found.items()))
