"""``srun`` of Slurm. A batch script is a single process: it sees ``SLURM_PROCID=0``, but nothing was launched.

Source: https://slurm.schedmd.com/srun.html ("Output environment variables")
"""

from __future__ import annotations

from collections.abc import Mapping

from comm_utils.errors import LaunchError
from comm_utils.launch.facts import LOOPBACK, Facts
from comm_utils.launch.hostlist import expand_counts, expand_hosts
from comm_utils.launch.info import LaunchInfo, integer
from comm_utils.launch.mpi import started_beside_slurm

__all__ = ["discover", "tasks_not_started"]

# The step's variables first: those of the job describe the allocation, of which a step may use a part.
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_COUNTS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_JOB = ("SLURM_JOB_ID", "SLURM_JOBID")
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
# Steps from this number on are Slurm's own: the batch script, the shell of an allocation.
_RESERVED_STEPS = 0xFFFFFFF0


def discover(environ: Mapping[str, str]) -> LaunchInfo | None:
    """Read the variables of a task of a job step; None where ``srun`` did not start this process itself.

    Raises:
        LaunchError: a variable is missing or malformed, or the tasks per node do not add up.
    """
    step = _first(environ, _STEP)
    if step is None or "SLURM_PROCID" not in environ or started_beside_slurm(environ) is not None:
        return None
    if integer(environ, step) >= _RESERVED_STEPS:
        return None
    facts = Facts(environ)
    facts.master()
    facts.number("rank", "SLURM_PROCID")
    tasks = facts.number("world_size", *_TASKS)
    if tasks is None:
        raise LaunchError(
            f"environment variable SLURM_PROCID is set to {environ['SLURM_PROCID']!r:.200} but SLURM_NTASKS is not "
            "set; start the script with srun, or unset SLURM_PROCID to run as a single process"
        )
    facts.number("local_rank", "SLURM_LOCALID")
    facts.number("node_rank", "SLURM_NODEID")
    _hosts(facts, environ, tasks)
    job = _first(environ, _JOB)
    if job is not None:
        facts.derive("job_id", f"{environ[job]}.{environ[step]}", f"environment variables {job} and {step}")
    facts.port()
    return facts.info("slurm")


def tasks_not_started(environ: Mapping[str, str]) -> str | None:
    """Return a sentence where Slurm has allocated several tasks and ``srun`` has not started this process as one."""
    variable = _first(environ, _TASKS)
    if variable is None or discover(environ) is not None:
        return None
    tasks = integer(environ, variable)
    if tasks < 2:
        return None
    return (
        f"Slurm has allocated {tasks} tasks ({_variable(variable)}), but srun has not started this process: it is a "
        f"single process, rank 0 of 1; start all tasks with 'srun python ...', or run one process with {variable}=1"
    )


def _hosts(facts: Facts, environ: Mapping[str, str], tasks: int) -> None:
    """Add the facts that follow from the lists of hosts and of tasks per host."""
    listed, per_host = _first(environ, _HOSTS), _first(environ, _COUNTS)
    hosts = expand_hosts(environ[listed], _variable(listed)) if listed is not None else []
    if per_host is not None:
        counts = expand_counts(environ[per_host], _variable(per_host))
        if sum(counts) != tasks and "SLURM_HET_SIZE" in environ:
            return  # a step over several components of a heterogeneous job, and the lists describe one of them
        _check_counts(environ, per_host, counts, tasks)
        if hosts and len(hosts) != len(counts):
            raise LaunchError(
                f"{_variable(per_host)}: got {environ[per_host]!r:.200}, {len(counts)} hosts; expected {len(hosts)} "
                f"({_variable(listed)}: {environ[str(listed)]!r:.200})"
            )
        node = facts.number("node_rank")
        if node is not None:
            facts.derive("local_world_size", counts[node], f"position {node} (SLURM_NODEID) in {per_host}")
    if len(hosts) == 1:
        facts.derive("master_addr", LOOPBACK, f"the only host of {listed}")
    elif environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        # Rank 0 is then on the first host that the user listed; the step's own list is sorted.
        listed = "SLURM_ARBITRARY_NODELIST"
        hosts = expand_hosts(environ[listed], _variable(listed)) if listed in environ else []
    if hosts:
        facts.derive("master_addr", hosts[0], f"first host of {listed}")


def _check_counts(environ: Mapping[str, str], variable: str, counts: list[int], tasks: int) -> None:
    got = f"{_variable(variable)}: got {environ[variable]!r:.200}"
    if sum(counts) != tasks:
        raise LaunchError(f"{got}, {sum(counts)} tasks; expected {tasks} ({_variable(_first(environ, _TASKS))})")
    if "SLURM_NODEID" in environ and integer(environ, "SLURM_NODEID") not in range(len(counts)):
        raise LaunchError(
            f"{_variable('SLURM_NODEID')}: got {environ['SLURM_NODEID']!r:.200}; expected 0 to {len(counts) - 1} for "
            f"{len(counts)} hosts ({_variable(variable)}: {environ[variable]!r:.200})"
        )


def _variable(name: str | None) -> str:
    return f"environment variable {name}"


def _first(environ: Mapping[str, str], variables: tuple[str, ...]) -> str | None:
    return next((variable for variable in variables if variable in environ), None)
