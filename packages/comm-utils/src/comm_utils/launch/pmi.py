"""Launchers that speak PMI and are none of those known by name, such as HPE Cray's PALS.

PMIx alone (``PMIX_RANK``) is not enough: the number of processes is not in the environment, only in the PMIx server.
:func:`comm_utils.launch.mpi_launcher` names the variable, so that MPI itself can be asked.

Sources: https://slurm.schedmd.com/mpi_guide.html (PMI), https://pmix.github.io/standard (PMIx),
https://github.com/SchedMD/slurm/blob/master/src/plugins/mpi/cray_shasta/apinfo.c (``PALS_*``),
https://github.com/argonne-lcf/alcf-nccl-tests/blob/main/pytests/launcher.sh (``PMI_LOCAL_RANK``)
"""

from __future__ import annotations

from collections.abc import Mapping

from comm_utils.launch.info import LaunchInfo
from comm_utils.launch.mpi import BATCH_JOB, mpi_info

__all__ = ["discover"]


def discover(environ: Mapping[str, str]) -> LaunchInfo | None:
    """Read ``PMI_RANK`` and ``PMI_SIZE``; None where one of them is not set.

    Raises:
        LaunchError: a value is not an integer, or two of them contradict each other.
    """
    return mpi_info(
        "pmi",
        environ,
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank=("PMI_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID"),
        local_world_size=("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"),
        job_id=("PALS_APID", "PMI_JOBID", *BATCH_JOB),
        node_rank=("PALS_NODEID",),
    )
