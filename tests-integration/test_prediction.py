"""From a benchmark and a recorded job to a prediction, with nothing made up in between."""

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

BACKEND = os.environ.get("TESTS_BACKEND", "gloo")
OPERATIONS = ("all_reduce", "broadcast", "all_gather_into_tensor", "barrier")

JOB = """
import sys
import torch
import comm_orchestrator as dist

folder, backend = sys.argv[1:]
dist.init_distributed(backend, verbose=False)
gradients = [torch.zeros(4096) for _ in range(3)]
weights, data = torch.zeros(1024), torch.randn(200, 200)
gathered = torch.zeros(1024 * dist.get_world_size())
dist.barrier()
dist.start_trace(folder)
for step in range(5):
    started = []
    for gradient in gradients:
        data = torch.relu(data @ data.T).clamp(max=1)
        started.append(dist.all_reduce(gradient, async_op=True))
    for one in started:
        one.wait()
    dist.all_gather_into_tensor(gathered, weights)
    dist.broadcast(weights, 0)
dist.barrier()
dist.stop_trace()
dist.destroy_process_group()
"""


def commctl(*arguments: object) -> str:
    command = [sys.executable, "-m", "comm_orchestrator", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = ("-b", "64", "-e", "256K", "-f", "4", "-n", "10", "-w", "2", "--rounds", "3")
    commctl("bench", *OPERATIONS, *sizes, "--ranks", 2, "--backend", BACKEND, "--json", folder / "bench.json")
    shown = commctl("fit", folder / "bench.json", "-o", folder / "model.json", "--hold-out", "sizes")
    assert "predicted by a model, not measured" in shown
    assert all(operation in shown for operation in OPERATIONS)
    return folder / "model.json"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, rank_environment: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.py").write_text(JOB)
    run_ranks(str(folder / "job.py"), 2, str(folder / "trace"), BACKEND, env=rank_environment, timeout_s=100)
    return folder / "trace"


def predicted(trace: Path, model: Path, file: Path, *options: object) -> dict[str, Any]:
    shown = commctl("predict", trace, "--model", model, "--json", file, *options)
    assert "predicted by a model, not measured" in shown.splitlines()[0]
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_recorded_job_as_it_was(model: Path, trace: Path, tmp_path: Path) -> None:
    found = predicted(trace, model, tmp_path / "p.json")
    calls = {row["operation"]: row["calls"] for row in found["operations"]}
    assert calls["all_reduce"] == 15
    assert calls["broadcast"] == calls["all_gather_into_tensor"] == 5
    whole, bare = (found["predicted_by_a_model"][name] for name in ("whole_job", "without_communication_s"))
    # Computing stays as recorded, and no call takes less than nothing.
    assert 0 < bare <= whole["low_s"] <= whole["value_s"] <= whole["high_s"]
    assert bare <= found["recorded"]["whole_job_s"]
    assert found["unsure"].keys() <= {"unchecked", "size", "dtype"}


def test_the_same_job_on_more_hosts_takes_longer_over_a_slower_network(
    model: Path, trace: Path, tmp_path: Path
) -> None:
    networks = ("1us,400Gbit", "50us,1Gbit", "1ms,10Mbit")
    options = ("--nodes", 4, "--ranks-per-node", 2)
    found = [predicted(trace, model, tmp_path / "p.json", *options, "--network", network) for network in networks]
    times = [one["predicted_by_a_model"]["whole_job"]["value_s"] for one in found]
    assert times == sorted(times)
    assert times[-1] > 2 * times[0]
    for one in found:
        assert {row["ranks"] for row in one["operations"]} == {8}
        assert "network" in one["unsure"]
