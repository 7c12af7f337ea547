"""One mpi4py, as its wheel comes, works with each mpirun."""

from __future__ import annotations

import sys

import pytest

from launchers import mpi
from launchers.launcher import Launcher, reports

PROGRAM = """
import json
from mpi4py import MPI
world = MPI.COMM_WORLD
facts = {"rank": world.rank, "size": world.size, "sum": world.allreduce(world.rank)}
print(json.dumps({**facts, "library": MPI.Get_library_version()}), flush=True)
"""
LIBRARIES = {mpi.OPEN_MPI.name: "Open MPI", mpi.MPICH.name: "MPICH", mpi.INTEL_MPI.name: "Intel(R) MPI"}


@pytest.mark.parametrize(("launcher", "library"), LIBRARIES.items(), ids=LIBRARIES, indirect=["launcher"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_mpi4py(launcher: Launcher, library: str, ranks: int) -> None:
    pytest.importorskip("mpi4py")
    said = reports(launcher.run([sys.executable, "-c", PROGRAM], ranks))
    assert [(report["rank"], report["size"]) for report in said] == [(rank, ranks) for rank in range(ranks)]
    assert {report["sum"] for report in said} == {ranks * (ranks - 1) // 2}
    assert all(report["library"].startswith(library) for report in said)
