"""The patches that pages show apply to the sources, touch the files that they say, and do what the page promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from code_blocks import blocks

ROOT = Path(__file__).resolve().parent.parent.parent
GUIDE = ROOT / "docs" / "adding-a-collective.md"
PROGRAM = """
import torch

import comm_orchestrator as dist

dist.init_distributed("gloo", verbose=False)
tensor = torch.tensor([12, 18, 35]) * (dist.get_rank() + 1)
expected = torch.tensor([12, 18, 35])
for op in ("gcd", dist.ReduceOp.GCD):
    for _ in range(2):  # checked in full, and as a call that was checked before
        reduced = tensor.clone()
        dist.all_reduce(reduced, op)
        assert torch.equal(reduced, expected), reduced
scattered = torch.empty(3, dtype=torch.int64)
dist.reduce_scatter_tensor(scattered, tensor.repeat(2), "gcd")
assert torch.equal(scattered, expected), scattered
dist.destroy_process_group()
print("reduced")
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a copy of the packages' sources with the guide's patch."""
    (patch,) = [block.text for block in blocks(GUIDE) if block.language == "diff"]
    for package in sorted((ROOT / "packages").iterdir()):
        if (package / "src").is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(package / "src", tmp_path / "packages" / package.name / "src", ignore=ignored)
    # Outside of a repository, git apply patches the files of the folder.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tmp_path, env=environment, check=True)
    assert set(re.findall(r"^\+\+\+ b/(\S+)$", patch, re.MULTILINE)) == {
        "packages/comm-utils/src/comm_utils/reduce_op.py",
        "packages/comm-collectives/src/comm_collectives/reduction/local.py",
    }
    return tmp_path


def test_a_reduction(sources: Path) -> None:
    (sources / "program.py").write_text(PROGRAM)
    path = os.pathsep.join(str(one) for one in sorted(sources.glob("packages/*/src")))
    # Not run_ranks(), whose ranks have imported the sources as they are.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [*torchrun, str(sources / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("reduced") == 2
