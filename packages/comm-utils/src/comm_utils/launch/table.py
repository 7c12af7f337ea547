"""The launchers that come with this package, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from comm_utils.launch import (
    azureml,
    intel_mpi,
    kubernetes,
    mpich,
    openmpi,
    pmi,
    sagemaker,
    single,
    slurm,
    torchrun,
)
from comm_utils.launch.info import LaunchInfo

__all__ = ["LAUNCHERS", "Launchers"]

Launchers = tuple[tuple[str, Callable[[Mapping[str, str]], LaunchInfo | None]], ...]

# The more specific one is asked first. RANK and WORLD_SIZE are set for this process on purpose.
# The clouds run on top of Open MPI and know the first host, which it does not say. Slurm steps aside for MPI's own
# launchers, but comes before the generic variables of PMI, which srun sets too. Intel's Hydra sets MPICH's variables.
LAUNCHERS: Launchers = (
    ("torchrun", torchrun.discover),
    ("kubernetes", kubernetes.discover),
    ("azureml", azureml.discover),
    ("sagemaker", sagemaker.discover),
    ("slurm", slurm.discover),
    ("openmpi", openmpi.discover),
    ("intel_mpi", intel_mpi.discover),
    ("mpich", mpich.discover),
    ("pmi", pmi.discover),
    ("single", single.discover),
)
