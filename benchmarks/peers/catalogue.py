"""The peers: what is needed to have each, and how its ranks are started."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from measuring import free_port, instruction_sets

__all__ = ["DEEPSPEED", "DEEPSPEEDS_OPERATOR", "PEERS", "Peer"]

# Where tools/install_launchers.py puts them.
LAUNCHERS = Path(sys.prefix) / "launchers"
# What a launcher around this program would have left for ours.
FOREIGN = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDRA_", "I_MPI_", "MPI4PY_", "SLURM_")
OF_ONE_RUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CCL_SHARED_MEMORY", "CCL_ATL_SHM")


@dataclass(frozen=True)
class Peer:
    """``module``: of ``libraries``; ``needs``: modules that have to be installed; ``apart``: measured by itself.

    ``mpi``: the folder of its ``mpirun``, and ``library`` what mpi4py, whose wheel suits them all, is to load.
    ``instructions``: the instruction set that its x86-64 code uses without asking whether the processor has it.
    """

    name: str
    module: str
    needs: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    apart: bool = False
    mpi: str = ""
    library: str = ""
    options: tuple[str, ...] = ()
    session: str = "bench-peers"
    instructions: str = ""

    @property
    def folder(self) -> Path:
        return LAUNCHERS / self.mpi

    def missing(self) -> str:
        """Why it cannot be measured here, or nothing."""
        if absent := [name for name in self.needs if importlib.util.find_spec(name) is None]:
            return f"{', '.join(absent)} is not installed (nox -s {self.session} installs it)"
        if self.mpi and not (self.folder / "bin" / "mpirun").exists():
            return f"there is no {self.folder}/bin/mpirun (python tools/install_launchers.py {self.mpi})"
        if self.instructions and platform.machine() == "x86_64" and self.instructions not in instruction_sets():
            return f"its code needs {self.instructions}, which this processor does not have"
        if "comm_backend_ccl" in self.needs:
            from comm_backend_ccl import oneccl_library, provider

            if self.variables and (reason := oneccl_library.unavailable_reason()):
                return reason[0]
            available = provider.availability()["ccl"]
            return "" if available.usable else available.reason
        return ""

    def commands(self, program: Sequence[str], ranks: int) -> list[tuple[list[str], dict[str, str]]]:
        """What to start, and the variables of each."""
        environ = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
        for name in OF_ONE_RUN:
            environ.pop(name, None)
        environ |= {"OMP_NUM_THREADS": "1", **self.variables}
        if self.mpi:
            # Intel's mpirun looks for its other programs there.
            environ["PATH"] = os.pathsep.join((str(self.folder / "bin"), environ.get("PATH", os.defpath)))
            environ["MPI4PY_LIBMPI"] = str(self.folder / "lib" / self.library)
            command = [str(self.folder / "bin" / "mpirun"), *self.options, "-n", str(ranks), *program]
            return [(command, environ)]
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        # LOCAL_SIZE is DeepSpeed's name for it.
        environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(ranks))
        return [(list(program), {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]


ONECCL = {"CCL_SHARED_MEMORY": "0", "CCL_ATL_SHM": "1"}
DEEPSPEED = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions")}
# Its functions are compiled for this instruction set one by one; the compiler accepts them on every x86-64 processor,
# and a rank of a processor without it ends by SIGILL in its first call.
DEEPSPEEDS_OPERATOR = "avx512bw"
# As root, which Open MPI has to be told twice.
OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# Each rank takes a core itself. With more ranks than cores, an MPI has to be told so that it gives way while it waits.
NOT_BOUND = ("--oversubscribe", "--bind-to", "none")
INTEL_MPI = {"I_MPI_ROOT": str(LAUNCHERS / "impi-rt"), "I_MPI_PIN": "0"}

PEERS = {
    peer.name: peer
    for peer in (
        Peer("ours", "ours", ("comm_orchestrator", "comm_backend_ccl")),
        Peer("oneCCL", "ours", ("comm_orchestrator", "comm_backend_ccl"), ONECCL),
        Peer("Open MPI", "mpi", ("mpi4py",), OPEN_MPI, mpi="openmpi", library="libmpi.so.40", options=NOT_BOUND),
        Peer("MPICH", "mpi", ("mpi4py",), mpi="mpich", library="libmpi.so.12"),
        Peer("Intel MPI", "mpi", ("mpi4py",), INTEL_MPI, mpi="impi-rt", library="libmpi.so.12"),
        Peer("DeepSpeed", "deepspeed_shm", ("deepspeed",), DEEPSPEED, instructions=DEEPSPEEDS_OPERATOR),
        Peer("gloo", "gloo", apart=True),
    )
}
