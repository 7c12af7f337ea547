"""Run ``commctl bench``: refuse impossible requests, then start the ranks, or be one of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from comm_orchestrator import devices, facade
from comm_orchestrator.facade import Compression
from comm_orchestrator.tools import local_ranks
from comm_orchestrator.tools.bench import plot, rank
from comm_orchestrator.tools.bench.operations import benchmarks
from comm_orchestrator.tools.bench.options import Options
from comm_orchestrator.tools.bench.plan import check_world, plan
from comm_orchestrator.tools.errors import tell, tell_in_turn
from comm_utils import operations
from comm_utils.errors import ArgumentError, BackendUnavailableError, CommError
from comm_utils.launch import LaunchInfo, discover, mpi_launcher, with_plugins
from comm_utils.observability.bench_results import load
from comm_utils.operations import Role

__all__ = ["check_files", "check_libraries", "check_memory", "run"]

_INSTALL = {
    "mpi4py": "pip install 'comm-orchestrator[mpi]'",
    "deepspeed": "pip install 'deepspeed==0.19.*'",
}


def check_files(options: Options) -> None:
    """Files can be written and read, and what writes them is there.

    Raises:
        ArgumentError: names the option.
        BackendUnavailableError: matplotlib is missing.
    """
    if options.plot:
        suffix = Path(options.plot).suffix
        if suffix.lower() not in plot.SUFFIXES:
            raise ArgumentError(
                f"--plot: got {options.plot!r}; expected a file that ends in {' or '.join(plot.SUFFIXES)}"
            )
        if not plot.is_available():
            raise BackendUnavailableError(
                "--plot: needs matplotlib; install it with: pip install 'comm-orchestrator[plot]'"
            )
        if _without_data(options):
            raise ArgumentError(
                f"--plot: got {options.operations[0]}, which has no size; expected another operation, or no --plot"
            )
    for name in ("json", "csv", "plot"):
        if path := getattr(options, name):
            _check_writable(f"--{name}", Path(path))
    written = [path for path in (options.json, options.csv, options.plot) if path]
    if len({Path(path).absolute() for path in written}) < len(written):
        raise ArgumentError(f"got the same file twice among {', '.join(written)}; expected one for each")
    if options.compare:
        try:
            load(options.compare)
        except OSError as error:
            raise ArgumentError(f"--compare: {options.compare}: {error.strerror or error}") from None
        except ArgumentError as error:
            raise ArgumentError(f"--compare: {error}") from None


def _check_writable(name: str, path: Path) -> None:
    folder = path.absolute().parent
    if path.is_dir():
        raise ArgumentError(f"{name}: got {path}, which is a folder; expected a file")
    if not folder.is_dir():
        raise ArgumentError(f"{name}: got {path}, and there is no folder {folder}; expected one that exists")
    if not os.access(path if path.exists() else folder, os.W_OK) or not os.access(folder, os.W_OK):
        raise ArgumentError(f"{name}: got {path}, which cannot be written; expected a file in a folder that can be")


def check_libraries(options: Options, environ: Mapping[str, str], by_mpi: bool) -> None:
    """Backends and peers are there.

    Raises:
        BackendUnavailableError: one is not; says how to install it.
        ArgumentError: a backend is unknown, or MPI did not start this process.
    """
    available = facade.available_backends()
    for name in options.backends:
        if name not in available:
            raise ArgumentError(f"--backend: got {name!r}; expected some of {', '.join(sorted(available))}")
        if not available[name].usable:
            one = available[name]
            remedy = f"; {one.remedy}" if one.remedy else ""
            raise BackendUnavailableError(f"--backend: {name} cannot be used here: {one.reason}{remedy}")
    for peer in options.peers:
        if importlib.util.find_spec(peer) is None:
            raise BackendUnavailableError(f"--peers: {peer} is not installed; install it with: {_INSTALL[peer]}")
    if "mpi4py" in options.peers and not by_mpi:
        raise ArgumentError(
            "--peers: got mpi4py, and no MPI launcher started this process; expected one: "
            "mpirun -n 2 commctl bench --peers mpi4py"
        )


def check_compression(options: Options) -> None:
    """Codecs exist, and some operation is compressed.

    Raises:
        ArgumentError: none is, or a codec is unknown; says which there are.
    """
    for name in options.compressions:
        if name != "none":
            try:
                Compression(name)
            except ArgumentError as error:
                raise ArgumentError(f"--compression: {error}") from None
    served = [row.name for row in map(operations.get, benchmarks()) if row.argument(Role.COMPRESSION)]
    if set(options.compressions) - {"none"} and not set(options.operations) & set(served):
        raise ArgumentError(
            f"--compression: got {', '.join(options.compressions)} for {', '.join(options.operations)}; expected one "
            f"of {', '.join(served)} among the operations"
        )


def check_memory(options: Options, ranks_here: int, launched: bool) -> None:
    """Refuse ranks, with two buffers each and what the library needs beside them, that the free memory does not hold.

    Raises:
        ArgumentError: says how many ranks, or bytes, fit.
    """
    free = local_ranks.memory_for_data_bytes(0 if launched else ranks_here)
    needed = 0 if _without_data(options) else 3 * options.maxbytes * ranks_here
    if free is not None and needed > free:
        raise ArgumentError(
            f"--maxbytes: got {options.maxbytes}, which takes {needed / 2**30:.3g} GiB with {ranks_here} ranks on "
            f"this host, where {free / 2**30:.3g} GiB are free for data; expected {free // (3 * ranks_here)} at most"
        )


def run(options: Options) -> int:
    """Return the exit code: 0, 1 for a finding or a failure, 2 for wrong usage, in which case nothing was started."""
    launch: LaunchInfo | None = None
    try:
        launch = discover(os.environ, with_plugins())
        by_mpi = mpi_launcher(os.environ) is not None
        launched = launch.launcher != "none" or by_mpi
        ranks = launch.world_size if launched else _ranks(options)
        _check(options, launch, launched, by_mpi, ranks)
    except CommError as error:
        return tell(error) if launch is None else tell_in_turn(error, launch)
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
    check_libraries(options, os.environ, by_mpi)
    check_compression(options)
    if launch.rank == 0:
        check_files(options)
    on_this_host = (launch.local_world_size or 1) if launched else ranks
    if _device(options) == "cpu":
        check_memory(options, on_this_host, launched)
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


def _without_data(options: Options) -> bool:
    return all(operations.get(name).pattern.is_empty for name in options.operations)
