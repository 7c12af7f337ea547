"""Hydra, the ``mpiexec`` of MPICH and of the libraries that come from it (MVAPICH, ParaStation).

Hydra sets nothing that tells two concurrent ``mpiexec`` apart; the batch system's job is the nearest to it.

Source: https://github.com/pmodels/mpich/blob/main/src/pm/hydra/proxy/pmip_cb.c
"""

from __future__ import annotations

from collections.abc import Mapping

from comm_utils.launch.info import LaunchInfo
from comm_utils.launch.mpi import BATCH_JOB, mpi_info

__all__ = ["discover"]


def discover(environ: Mapping[str, str]) -> LaunchInfo | None:
    """Read ``PMI_RANK``, ``PMI_SIZE``, ``MPI_LOCALRANKID`` and ``MPI_LOCALNRANKS``; None where Hydra did not set them.

    Raises:
        LaunchError: a value is not an integer, or two of them contradict each other.
    """
    if "MPI_LOCALRANKID" not in environ:
        return None
    return mpi_info(
        "mpich",
        environ,
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank=("MPI_LOCALRANKID",),
        local_world_size=("MPI_LOCALNRANKS",),
        job_id=("PMI_JOBID", *BATCH_JOB),
    )
