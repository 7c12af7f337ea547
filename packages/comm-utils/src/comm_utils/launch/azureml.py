"""MPI jobs of Azure Machine Learning: an ``mpirun`` that the service starts, and its variables for the first node.

A job of its PyTorch kind sets ``RANK`` and companions and never gets here.

Sources: https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu,
https://learn.microsoft.com/azure/batch/batch-compute-node-environment-variables (``AZ_BATCH_MASTER_NODE``),
https://azure.github.io/azureml-web/docs/cheatsheet/distributed-training/ (both, from one node and several)
"""

from __future__ import annotations

from collections.abc import Mapping

from comm_utils.launch import intel_mpi, mpich, openmpi
from comm_utils.launch.facts import Facts
from comm_utils.launch.info import LaunchInfo

__all__ = ["discover"]

# The image decides which; Open MPI is what the service's own images have.
_MPI = (openmpi.discover, intel_mpi.discover, mpich.discover)


def discover(environ: Mapping[str, str]) -> LaunchInfo | None:
    """Complete what the MPI launcher says; None where this is no such job, or no MPI launcher started the process.

    Raises:
        LaunchError: a value is not an integer, or two of them contradict each other.
    """
    if "AZUREML_EXPERIMENT_ID" not in environ:
        return None
    ranks = next((info for discover in _MPI if (info := discover(environ)) is not None), None)
    if ranks is None:
        return None
    facts = Facts(environ)
    facts.master()
    facts.adopt(ranks)
    facts.one_host()
    if "AZ_BATCH_MASTER_NODE" in environ:
        # The port beside it is reserved for Azure Batch.
        host = environ["AZ_BATCH_MASTER_NODE"].rpartition(":")[0] or environ["AZ_BATCH_MASTER_NODE"]
        facts.derive("master_addr", host, "environment variable AZ_BATCH_MASTER_NODE")
    facts.text("master_addr", "AZ_BATCHAI_MPI_MASTER_NODE")
    facts.text("job_id", "AZUREML_RUN_ID")
    facts.port()
    return facts.info("azureml")
