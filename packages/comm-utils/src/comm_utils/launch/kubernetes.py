"""Training operators of Kubernetes, which start one process per node and leave the rest to torchrun.

They set ``PET_*``, the defaults of torchrun's arguments. A process that sees them without ``RANK`` was started without
torchrun; where one process per node was asked for, nothing is missing.

Sources: https://www.kubeflow.org/docs/components/trainer/user-guides/pytorch/,
https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/torch/torch.go (which variables),
https://docs.pytorch.org/docs/stable/elastic/run.html (``--nnodes``, ``--nproc-per-node``)
"""

from __future__ import annotations

from collections.abc import Mapping

from comm_utils.errors import LaunchError
from comm_utils.launch.facts import Facts
from comm_utils.launch.info import LaunchInfo
from comm_utils.launch.mpi import mpi_launcher

__all__ = ["discover"]

_NODES, _NODE_RANK, _PROCESSES = "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"
_REMEDY = "start the script with torchrun, which reads this variable"


def discover(environ: Mapping[str, str]) -> LaunchInfo | None:
    """Read ``PET_NNODES``, ``PET_NODE_RANK`` and their companions; None where neither of the two is set.

    Raises:
        LaunchError: only torchrun can do what the variables ask for, or one is missing or is not an integer.
    """
    # A process that an MPI launcher started inside the pod has its rank from there.
    if not {_NODES, _NODE_RANK} & environ.keys() or mpi_launcher(environ) is not None:
        return None
    processes = environ.get(_PROCESSES, "1")
    if processes != "1":
        raise LaunchError(
            f"environment variable {_PROCESSES}: got {processes!r:.200}, but this is one process per node; {_REMEDY}"
        )
    nodes = _nodes(environ.get(_NODES, "1"))
    if nodes > 1 and _NODE_RANK not in environ:
        raise LaunchError(
            f"environment variable {_NODES} is set to {environ[_NODES]!r:.200} but {_NODE_RANK} is not set; set it to "
            f"the index of this node, or unset {_NODES} to run as a single process"
        )
    facts = Facts(environ)
    facts.master()
    facts.text("master_addr", "PET_MASTER_ADDR")
    facts.number("master_port", "PET_MASTER_PORT")
    facts.text("job_id", "PET_RDZV_ID")
    facts.derive("world_size", nodes, _source(environ, _NODES))
    facts.derive("local_world_size", 1, _source(environ, _PROCESSES))
    for field in ("rank", "node_rank"):
        facts.number(field, _NODE_RANK)
        facts.derive(field, 0, f"default of {_NODE_RANK}")
    facts.derive("local_rank", 0, "one process per node")
    facts.one_host()
    facts.port()
    return facts.info("kubernetes")


def _source(environ: Mapping[str, str], variable: str) -> str:
    return f"environment variable {variable}" if variable in environ else f"default of {variable}"


def _nodes(text: str) -> int:
    lowest, _, highest = text.partition(":")
    if highest not in ("", lowest):
        raise LaunchError(
            f"environment variable {_NODES}: got {text!r:.200}, a number of nodes that may change; {_REMEDY}"
        )
    if not lowest.isdecimal():
        raise LaunchError(f"environment variable {_NODES}: got {text!r:.200}; expected an integer")
    return int(lowest)
