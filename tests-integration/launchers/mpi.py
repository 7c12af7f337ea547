"""mpirun of Open MPI, MPICH and Intel MPI, as tools/install_launchers.py puts them beside the interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launchers.launcher import Launcher
from launchers.processes import Command

FOLDER = Path(sys.prefix) / "launchers"


@dataclass(frozen=True)
class Mpi:
    """One implementation: ``library`` is what mpi4py, whose wheel suits them all, is to load."""

    name: str
    library: str
    options: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def mpirun(self) -> Path:
        return self.folder / "bin" / "mpirun"

    def missing(self) -> str:
        """Why it can't be started here, or nothing."""
        return "" if self.mpirun.exists() else f"no {self.mpirun}: run python tools/install_launchers.py {self.name}"

    def environment(self) -> dict[str, str]:
        # Intel's mpirun looks for its other programs there, and is a script.
        path = os.pathsep.join((str(self.folder / "bin"), os.environ.get("PATH", os.defpath)))
        variables = {name: value.format(folder=self.folder) for name, value in self.variables.items()}
        return {"PATH": path, "MPI4PY_LIBMPI": str(self.folder / "lib" / self.library), **variables}

    def command(self, program: Sequence[str], ranks: int) -> Command:
        return Command([str(self.mpirun), *self.options, "-n", str(ranks), *program], self.environment())


# More ranks than cores, and as root, which Open MPI has to be told twice.
OPEN_MPI = Mpi(
    "openmpi",
    "libmpi.so.40",
    options=("--oversubscribe", "--bind-to", "none"),
    variables={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
)
MPICH = Mpi("mpich", "libmpi.so.12")
INTEL_MPI = Mpi("impi-rt", "libmpi.so.12", variables={"I_MPI_ROOT": "{folder}"})
ALL = {mpi.name: mpi for mpi in (OPEN_MPI, MPICH, INTEL_MPI)}


def mpirun(mpi: Mpi) -> Launcher:
    return Launcher(f"mpirun of {mpi.name}", lambda program, ranks: [mpi.command(program, ranks)])
