"""Code that the launchers of MPI share."""

from __future__ import annotations

from collections.abc import Mapping

from comm_utils.launch.facts import Facts
from comm_utils.launch.info import LaunchInfo

__all__ = ["BATCH_JOB", "mpi_info", "mpi_launcher", "size_beside", "started_beside_slurm"]

# The job of Slurm, PBS or LSF: second best where a launcher names no job, for its other launches have the same.
BATCH_JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
# Each is set per process by the launcher, never by a user or a batch system for a whole job.
_SIGNS = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "MPI_LOCALRANKID",
    "PALS_RANKID",
    "MV2_COMM_WORLD_RANK",
)
_SIZES = {
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE",
    "MV2_COMM_WORLD_RANK": "MV2_COMM_WORLD_SIZE",
}
# srun itself sets PMI_* (--mpi=pmi2), PMIX_* (--mpi=pmix) and PALS_* (--mpi=cray_shasta), but never these.
_NEVER_SLURM = "MPI_LOCALRANKID"
_PERHAPS_SLURM = ("OMPI_COMM_WORLD_RANK", "PRTE_LAUNCHED")
_SLURM_NAMESPACE = "slurm.pmix."


def mpi_launcher(environ: Mapping[str, str]) -> str | None:
    """Return the variable which shows that a launcher of MPI started this process; None where there is none."""
    return next((variable for variable in _SIGNS if variable in environ), None)


def size_beside(variable: str) -> str | None:
    """Return the variable with the world size that belongs to ``variable``, from :func:`mpi_launcher`."""
    return _SIZES.get(variable)


def started_beside_slurm(environ: Mapping[str, str]) -> str | None:
    """Return the variable which shows that an MPI launcher other than srun started this process.

    Such a process also sees the Slurm variables of the daemon or the shell that it comes from.
    """
    if _NEVER_SLURM in environ:
        return _NEVER_SLURM
    # The PMIx library in Slurm's daemon may set Open MPI's variables as well.
    if environ.get("PMIX_NAMESPACE", "").startswith(_SLURM_NAMESPACE):
        return None
    return next((variable for variable in _PERHAPS_SLURM if variable in environ), None)


def mpi_info(
    launcher: str,
    environ: Mapping[str, str],
    rank: str,
    world_size: str,
    local_rank: tuple[str, ...],
    local_world_size: tuple[str, ...],
    job_id: tuple[str, ...],
    node_rank: tuple[str, ...] = (),
) -> LaunchInfo | None:
    """Facts from a launcher that tells these variables; None where ``rank`` or ``world_size`` is not set.

    The variables say nothing about other hosts: over several of them the master address stays open.

    Raises:
        LaunchError: a value is not an integer, or two of them contradict each other.
    """
    if rank not in environ or world_size not in environ:
        return None
    facts = Facts(environ)
    facts.master()
    facts.number("rank", rank)
    facts.number("world_size", world_size)
    facts.number("local_rank", *local_rank)
    facts.number("local_world_size", *local_world_size)
    facts.number("node_rank", *node_rank)
    facts.text("job_id", *job_id)
    facts.one_host()
    facts.port()
    return facts.info(launcher)
