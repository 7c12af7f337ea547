"""An operation that another package adds is checked, logged, traced, replayed, benchmarked and priced as all others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from comm_utils.testing import run_ranks

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent / "new_operation"
NAME = "reduce_scatter_in_place"
PATH = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])


def commctl(*arguments: object) -> str:
    command = [sys.executable, "-m", "comm_orchestrator", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, rank_environment: dict[str, Any]) -> Path:
    """Where the job, which also checks what is refused and logged, has left its trace."""
    folder = tmp_path_factory.mktemp("job") / "trace"
    environment = {**rank_environment, "PYTHONPATH": PATH}
    run_ranks(str(HERE / "job.py"), 2, str(folder), env=environment, timeout_s=100)
    return folder


def test_it_is_traced(trace: Path, tmp_path: Path) -> None:
    (found,) = json.loads(commctl("trace", "summary", trace, "--json"))["operations"]
    assert (found["operation"], found["calls"]) == (NAME, 6)
    commctl("trace", "merge", trace, "-o", tmp_path / "merged.json")
    assert NAME in (tmp_path / "merged.json").read_text()


def test_it_is_replayed(trace: Path) -> None:
    assert NAME in commctl("trace", "replay", trace, "--backend", "extended")


def test_it_is_measured_and_priced(trace: Path, tmp_path: Path) -> None:
    bench, model, predicted = (tmp_path / f"{name}.json" for name in ("bench", "model", "predicted"))
    sizes = ("-b", "64", "-e", "64K", "-f", "4", "-n", "5", "-w", "2", "--rounds", "2")
    commctl("bench", NAME, *sizes, "--ranks", 2, "--backend", "extended", "--json", bench)
    results = json.loads(bench.read_text())["results"]
    assert {(one["operation"], one["way"], one["wrong"]) for one in results} == {(NAME, "in_place", 0)}
    assert NAME in commctl("fit", bench, "-o", model)
    commctl("predict", trace, "--model", model, "--json", predicted)
    (row,) = {one["operation"]: one for one in json.loads(predicted.read_text())["operations"]}.values()
    assert row["operation"] == NAME
