"""A rank that the kernel kills for lack of memory, as in a container with a limit."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.testing import run_ranks_outcomes

BACKEND = os.environ.get("TESTS_BACKEND", "gloo")
_ROOT = Path("/sys/fs/cgroup")
_LIMIT_BYTES = 64 << 20


@contextlib.contextmanager
def small_cgroup() -> Iterator[Path]:
    """Make a cgroup whose processes may take 64 MiB more than they have when they join, of version 1 or 2."""
    is_first = (_ROOT / "memory").is_dir()
    own = next(
        (line.split(":", 2)[2].strip("/") for line in Path("/proc/self/cgroup").read_text().splitlines()
         if line.split(":", 2)[1] == ("memory" if is_first else "")), ""
    )  # fmt: skip
    folder = (_ROOT / "memory" if is_first else _ROOT) / own / f"comm-tests-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"this machine does not let a test make a cgroup: {error}")
    try:
        limit = folder / ("memory.limit_in_bytes" if is_first else "memory.max")
        try:
            limit.write_text(str(_LIMIT_BYTES))
        except OSError as error:
            pytest.skip(f"this machine does not let a test limit memory: {error}")
        yield folder
    finally:
        for _ in range(100):  # until the kernel has let go of the process
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def allocate(backend: str, folder: str) -> None:
    dist.init_distributed(backend, verbose=False)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
        kept = [bytearray(os.urandom(1 << 20)) for _ in range(4 * _LIMIT_BYTES >> 20)]
        raise AssertionError(f"{len(kept)} MiB within a limit of {_LIMIT_BYTES >> 20}")
    dist.all_reduce(tensor)


def test_the_error_of_the_others_says_that_the_kernel_killed_a_process() -> None:
    with small_cgroup() as folder:
        outcomes = run_ranks_outcomes(allocate, 2, BACKEND, str(folder), timeout_s=100)
    assert outcomes[0].exception_type == "PeerLostError"
    assert "rank 1 (pid " in outcomes[0].message
    assert "for lack of memory (see dmesg)" in outcomes[0].message
