"""``mpirun`` of Open MPI, versions 4 and 5.

``OMPI_COMM_WORLD_NODE_RANK`` is no index of the node: it counts the processes of all jobs on this one.
The id of the job is PMIx's name for it, which ``mpirun`` makes from its host and process id.

Source: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
"""

from __future__ import annotations

from collections.abc import Mapping

from comm_utils.launch.info import LaunchInfo
from comm_utils.launch.mpi import mpi_info

__all__ = ["discover"]


def discover(environ: Mapping[str, str]) -> LaunchInfo | None:
    """Read ``OMPI_COMM_WORLD_*``; None where they are not set.

    Raises:
        LaunchError: a value is not an integer, or two of them contradict each other.
    """
    return mpi_info(
        "openmpi",
        environ,
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job_id=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    )
