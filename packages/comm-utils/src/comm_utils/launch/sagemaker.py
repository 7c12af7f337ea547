"""Training jobs of Amazon SageMaker: the hosts are in the environment, the ranks where ``mpirun`` started them.

Without ``mpirun`` there is one process a host. The list of hosts is the same everywhere, sorted lexicographically; the
toolkit takes the first for the master and a host's position for its rank.

Sources: https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md (``SM_HOSTS``,
``SM_CURRENT_HOST``), its ``environment.py`` and ``torch_distributed.py`` (order, master), and
https://github.com/aws/sagemaker-python-sdk (``SM_MASTER_ADDR``, ``SM_MASTER_PORT``, set by its container drivers)
"""

from __future__ import annotations

from collections.abc import Mapping

from comm_utils.errors import ArgumentError, LaunchError
from comm_utils.json_files import parse
from comm_utils.launch import openmpi
from comm_utils.launch.facts import Facts
from comm_utils.launch.info import LaunchInfo

__all__ = ["discover"]


def discover(environ: Mapping[str, str]) -> LaunchInfo | None:
    """Read ``SM_HOSTS`` and ``SM_CURRENT_HOST``, and Open MPI's variables; None where ``SM_HOSTS`` is not set.

    Raises:
        LaunchError: a value is malformed, or two of them contradict each other.
    """
    if "SM_HOSTS" not in environ:
        return None
    hosts = _hosts(environ["SM_HOSTS"])
    facts = Facts(environ)
    facts.master()
    ranks = openmpi.discover(environ)
    if ranks is not None:
        # mpirun gives every rank the first host's SM_CURRENT_HOST.
        facts.adopt(ranks)
    else:
        _one_process_a_host(facts, hosts, environ.get("SM_CURRENT_HOST"))
    facts.one_host()
    facts.text("master_addr", "SM_MASTER_ADDR")
    facts.number("master_port", "SM_MASTER_PORT")
    facts.derive("master_addr", hosts[0], "first host of SM_HOSTS")
    facts.text("job_id", "TRAINING_JOB_NAME")
    facts.port()
    return facts.info("sagemaker")


def _hosts(text: str) -> list[str]:
    try:
        hosts = parse(text, "SM_HOSTS")
    except ArgumentError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) and host for host in hosts):
        raise LaunchError(
            f"""environment variable SM_HOSTS: got {text!r:.200}; expected a JSON list of hosts such as '["algo-1"]'"""
        )
    return hosts


def _one_process_a_host(facts: Facts, hosts: list[str], current: str | None) -> None:
    if current not in hosts:
        got = "it is not set" if current is None else f"got {current!r:.200}"
        raise LaunchError(
            f"environment variable SM_CURRENT_HOST: {got}; expected one of SM_HOSTS, {', '.join(hosts):.200}"
        )
    position = hosts.index(current)
    facts.derive("rank", position, "position of SM_CURRENT_HOST in SM_HOSTS")
    facts.derive("world_size", len(hosts), "number of hosts in SM_HOSTS")
    facts.derive("local_rank", 0, "one process per host")
    facts.derive("local_world_size", 1, "one process per host")
    facts.derive("node_rank", position, "position of SM_CURRENT_HOST in SM_HOSTS")
