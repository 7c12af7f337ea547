"""``commctl bench``: refuse what cannot be, then start the ranks, or be one of them."""

from __future__ import annotations

import os
import sys

import torch

from comm_orchestrator import devices
from comm_orchestrator.tools import local_ranks
from comm_orchestrator.tools.bench import rank, validation
from comm_orchestrator.tools.bench.options import Options
from comm_orchestrator.tools.bench.plan import check_world, plan
from comm_utils.errors import ArgumentError, CommError
from comm_utils.launch import LaunchInfo, discover, mpi_launcher, with_plugins

__all__ = ["run"]


def run(options: Options) -> int:
    """The exit code: 0, 1 for a finding or a failure, 2 for wrong usage, in which case nothing was started."""
    launch: LaunchInfo | None = None
    try:
        launch = discover(os.environ, with_plugins())
        by_mpi = mpi_launcher(os.environ) is not None
        launched = launch.launcher != "none" or by_mpi
        ranks = launch.world_size if launched else _ranks(options)
        _check(options, launch, launched, by_mpi, ranks)
    except CommError as error:
        if launch is None or launch.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    if launched:
        # An exit code of our own for failures means something to local_ranks.run() only.
        code = rank.run(options)
        return code if code == 2 else int(bool(code))
    code = local_ranks.run("comm_orchestrator.tools.bench.rank", [options.dumps()], ranks)
    return 1 if code == local_ranks.FAILED else code


def _check(options: Options, launch: LaunchInfo, launched: bool, by_mpi: bool, ranks: int) -> None:
    if launched and options.ranks:
        raise ArgumentError(
            f"--ranks: got {options.ranks}, and {launch.launcher if launch.launcher != 'none' else 'an MPI launcher'} "
            "has started the ranks; leave it out, or run commctl without a launcher"
        )
    validation.check_libraries(options, os.environ, by_mpi)
    if launch.rank == 0:
        validation.check_files(options)
    on_this_host = (launch.local_world_size or 1) if launched else ranks
    if _device(options) == "cpu":
        validation.check_memory(options, on_this_host)
    if not launched or launch.launcher != "none":
        plan(options, check_world(options, ranks))


def _device(options: Options) -> str:
    if options.backends:
        return {"nccl": "cuda", "xccl": "xpu"}.get(options.backends[0], "cpu")
    return devices.device_type()


def _ranks(options: Options) -> int:
    kind = _device(options)
    found = getattr(torch, kind).device_count() if kind != "cpu" else 0
    if found and options.ranks > found:
        raise ArgumentError(
            f"--ranks: got {options.ranks} with {found} {kind} devices; expected {found} at most, or --backend gloo "
            "for CPU tensors"
        )
    return options.ranks or found or 2
