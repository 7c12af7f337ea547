"""The patches that pages show apply to the sources, touch few files, and do what the program below each asks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest
from code_blocks import Block, blocks

ROOT = Path(__file__).resolve().parent.parent.parent
COLLECTIVES = "packages/comm-collectives/src/comm_collectives"
#: The page and what is added -> the files that the patch touches.
PATCHES = {
    "adding-a-collective.md: a collective": {
        "packages/comm-utils/src/comm_utils/operations/table.py",
        f"{COLLECTIVES}/reduce_scatter.py",
        f"{COLLECTIVES}/__init__.py",
        "packages/comm-orchestrator/src/comm_orchestrator/facade/__init__.py",
    },
    "adding-a-collective.md: a reduction": {
        "packages/comm-utils/src/comm_utils/reduce_op.py",
        "packages/comm-utils/src/comm_utils/torch_support/folding.py",
        f"{COLLECTIVES}/objects/reducing.py",
    },
    "adding-a-wrapper.md: a wrapper": {f"{COLLECTIVES}/slow_link.py"},
}


def patches() -> list[tuple[Block, Block]]:
    """Return every patch of the documentation with the program below it."""
    found = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        every = blocks(page)
        for patch, program in zip_longest(every, every[1:]):
            if patch.language == "diff":
                assert program is not None, f"{patch} has no program below it"
                assert "patched" in program.options, f"{patch} is not followed by a program to be patched"
                found.append((patch, program))
    return found


def test_every_program_has_its_patch() -> None:
    asked = {
        str(block) for page in (ROOT / "docs").rglob("*.md") for block in blocks(page) if "patched" in block.options
    }
    assert asked == {str(program) for _, program in patches()}


# Each dtype with the reduction of the page: right, or refused by every rank before anything is sent.
EVERY_DTYPE = """
import torch

import comm_orchestrator as dist

dist.init_distributed("gloo", verbose=False)
rank = dist.get_rank()
for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32):
    tensor = (torch.tensor([12, 18, 35]) * (rank + 1)).to(dtype)
    dist.all_reduce(tensor, "gcd")
    assert tensor.tolist() == [12, 18, 35], (dtype, tensor)
for dtype in (torch.bool, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
    for call in (
        lambda tensor: dist.all_reduce(tensor, "gcd"),
        lambda tensor: dist.reduce(tensor, 0, "gcd"),
        lambda tensor: dist.reduce_scatter_tensor(torch.ones(1, dtype=dtype), tensor, "gcd"),
        lambda tensor: dist.all_reduce_coalesced([tensor], "gcd"),
    ):
        try:
            if rank == 0:  # a call that sends anything would wait for the other
                call(torch.ones(2, dtype=dtype))
        except dist.ArgumentError as error:
            assert "op 'gcd' is not defined for torch." in str(error), error
        else:
            assert rank == 1, dtype
dist.barrier()
dist.destroy_process_group()
"""
MORE = {"adding-a-collective.md: a reduction": EVERY_DTYPE}


@pytest.mark.parametrize("place", range(len(PATCHES)), ids=list(PATCHES))
def test_a_patch(place: int, tmp_path: Path) -> None:
    patch, program = patches()[place]
    assert set(re.findall(r"^\+\+\+ b/(\S+)$", patch.text, re.MULTILINE)) == list(PATCHES.values())[place]
    for package in sorted((ROOT / "packages").iterdir()):
        if (package / "src").is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(package / "src", tmp_path / "packages" / package.name / "src", ignore=ignored)
    # Outside of a repository, git apply patches the files of the folder.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(["git", "apply", "-"], input=patch.text, text=True, cwd=tmp_path, env=environment, check=True)

    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for arguments in (("check",), ("format", "--check")):
        command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "packages"]
        style = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert style.returncode == 0, style.stdout + style.stderr
    run(tmp_path, "\n" * program.line + program.text)
    if more := MORE.get(list(PATCHES)[place]):
        run(tmp_path, more)


def run(tmp_path: Path, program: str) -> None:
    (tmp_path / "program.py").write_text(program)
    path = os.pathsep.join(str(one) for one in sorted(tmp_path.glob("packages/*/src")))
    # Not run_ranks(), whose ranks have imported the sources as they are.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [*torchrun, str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
