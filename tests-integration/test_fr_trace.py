"""torch's own analyzer, unchanged, finds the missing rank in dumps of hangs on real ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.testing import RankOutcome, run_ranks_outcomes

pytestmark = pytest.mark.slow

if find_spec("torch.distributed.flight_recorder") is None:
    pytest.skip("this torch has no fr_trace", allow_module_level=True)

BACKEND = os.environ.get("TESTS_BACKEND", "gloo")
TIMEOUT_S = 4
SEED = 20


def hang(backend: str, culprit: int, what: str) -> str:
    """Make some calls; then rank ``culprit`` does something else than the others, which get an error."""
    settings = {"checks": {"mismatch": "lazy"}}
    dist.init_distributed(dist_backend=backend, timeout=TIMEOUT_S, verbose=False, config=settings)
    rank, tensor = dist.get_rank(), torch.ones(1000)
    group = dist.new_group(ranks=list(range(dist.get_world_size())), group_desc="data parallel")
    for _ in range(SEED % 7):
        dist.all_reduce(tensor)
        dist.broadcast(tensor, src=1, group=group)
        dist.barrier(group=group)
    if rank == culprit and what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if rank != culprit:
            dist.all_reduce(tensor, group=group)
        elif what == "differ":
            dist.all_gather_into_tensor(torch.empty(3000), tensor, group=group)
        else:
            time.sleep(TIMEOUT_S + 1.5)
    except Exception as error:
        return type(error).__name__
    return ""


def analyzed(tmp_path: Path, environment: dict[str, Any], culprit: int, what: str) -> tuple[list[RankOutcome], str]:
    """Run the ranks, ``commctl postmortem --torch-dump`` and ``fr_trace``; what the latter says."""
    rings, dumps = tmp_path / "rings", tmp_path / "dumps"
    recording = {"COMM_FLIGHT_RECORDER__DIRECTORY": str(rings), "COMM_FLIGHT_RECORDER__KEEP_CLEAN": "true"}
    outcomes = run_ranks_outcomes(hang, 3, BACKEND, culprit, what, env=environment | recording, timeout_s=90)
    postmortem = ["-m", "comm_orchestrator", "postmortem", str(rings), "--torch-dump", str(dumps)]
    done = subprocess.run([sys.executable, *postmortem], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, (done, outcomes)
    assert f"rank {culprit}" in done.stdout.splitlines()[0]
    fr_trace = ["-m", "torch.distributed.flight_recorder.fr_trace", str(dumps)]
    traced = subprocess.run([sys.executable, *fr_trace], capture_output=True, text=True, timeout=120)
    assert traced.returncode == 0, traced.stderr
    assert "data parallel (" in traced.stderr
    return outcomes, traced.stderr


@pytest.mark.parametrize("what", ["idle", "kill"])
def test_a_rank_that_is_missing(tmp_path: Path, rank_environment: dict[str, Any], what: str) -> None:
    outcomes, traced = analyzed(tmp_path, rank_environment, 1, what)
    expected = "CommTimeoutError" if what == "idle" else "PeerLostError"
    assert [outcomes[rank].value for rank in (0, 2)] == [expected] * 2
    assert f"Not all ranks joining collective, sequence number: {2 * (SEED % 7) + 1}" in traced
    assert "missing ranks: {1}" in traced
    assert "collective: gloo:all_reduce" in traced
    assert "hang at " in traced


def test_a_rank_that_calls_another_operation(tmp_path: Path, rank_environment: dict[str, Any]) -> None:
    outcomes, traced = analyzed(tmp_path, rank_environment, 2, "differ")
    assert [one.value for one in outcomes] == ["CollectiveMismatchError"] * 3
    assert f"Collective sequence number: {2 * (SEED % 7) + 1} has errors" in traced
    # It takes the first rank that the folder lists for right.
    assert "Error type: COLLECTIVE_TYPE_MISMATCH" in traced
    assert "Not all ranks" not in traced
