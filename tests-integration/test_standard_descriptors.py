"""Ranks that start with standard input, output and error closed, as some services and daemons do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from comm_utils.testing import patience

# What native code prints goes to the descriptors 1 and 2, whatever they are.
RANK = """
import os, pathlib, sys, traceback
import torch
import comm_orchestrator as dist

try:
    dist.init_distributed(sys.argv[1], timeout=30, verbose=False)
    dist.all_reduce(torch.ones(1 << 14))
    for descriptor in (1, 2):
        os.write(descriptor, b"a warning of native code\\n" * 400)
    sums = []
    for _ in range(3):
        tensor = torch.ones(1 << 14)
        dist.all_reduce(tensor)
        sums.append(tensor.unique().tolist())
    dist.destroy_process_group()
    text = f"{sums} {[os.path.samestat(os.fstat(one), os.stat(os.devnull)) for one in (0, 1, 2)]}"
except BaseException:
    text = traceback.format_exc()
pathlib.Path(sys.argv[2]).write_text(text)
"""


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_what_is_printed_without_standard_output_does_not_reach_shared_memory_or_connections(
    backend: str, free_port: int, tmp_path: Path
) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), "OMP_NUM_THREADS": "1"}
    closed = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    ranks = [
        subprocess.Popen(
            [*closed, sys.executable, "-c", RANK, backend, str(tmp_path / str(rank))],
            env={**os.environ, **common, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert [one.wait(60 * patience()) for one in ranks] == [0, 0]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    expected = f"{[[2.0]] * 3} {[True] * 3}"
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [expected] * 2
