"""``mpirun`` and ``mpiexec.hydra`` of Intel MPI: Hydra's variables, and Intel's own for the job.

Source: what Intel MPI 2021.18 sets (``I_MPI_HYDRA_UUID`` is the same on all hosts of a launch, and not documented).
"""

from __future__ import annotations

from collections.abc import Mapping

from comm_utils.launch.info import LaunchInfo
from comm_utils.launch.mpi import mpi_info

__all__ = ["discover"]

# Set by Intel's Hydra for its processes. I_MPI_ROOT and other I_MPI_* are also set in shells that start none.
_SIGN = "I_MPI_HYDRA_UUID"


def discover(environ: Mapping[str, str]) -> LaunchInfo | None:
    """Read Hydra's variables where Intel's Hydra set them; None where it did not.

    Raises:
        LaunchError: a value is not an integer, or two of them contradict each other.
    """
    if _SIGN not in environ:
        return None
    return mpi_info(
        "intel_mpi",
        environ,
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank=("MPI_LOCALRANKID",),
        local_world_size=("MPI_LOCALNRANKS",),
        job_id=(_SIGN,),
    )
