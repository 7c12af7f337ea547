"""Ranks without standard input, output and error: they start so, or close them later, as some daemons do."""

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


# The shared tensor, the group and its shared tensor come after the descriptors were closed.
CLOSING = """
import fcntl, os, pathlib, sys, traceback
import torch
import comm_orchestrator as dist

def print_natively():
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"a warning of native code\\n" * 400)
        except OSError:  # closed
            pass

def is_harmless(descriptor):
    try:
        found = os.fstat(descriptor), fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError:
        return True
    return os.path.samestat(found[0], os.stat(os.devnull)) or found[1] == os.O_RDONLY

def reduce(tensor, group=None):
    tensor.fill_(1.0)
    dist.barrier(group)
    print_natively()
    dist.barrier(group)
    dist.all_reduce(tensor, group=group)
    return tensor.unique().tolist()

try:
    dist.init_distributed(sys.argv[1], timeout=30, verbose=False)
    for descriptor in (1, 2):
        os.close(descriptor)
    found = []
    if sys.argv[3] == "tensor":
        found.append(reduce(dist.empty_shared(1 << 18)))
        assert is_harmless(1) and is_harmless(2)
    group = dist.new_group([0, 1])
    assert is_harmless(1) and is_harmless(2)
    for tensor in (torch.empty(1 << 14), dist.empty_shared(1 << 14), torch.empty(1 << 20)):
        found += [reduce(tensor, group), reduce(tensor)]
    dist.destroy_process_group()
    text = str(found)
except BaseException:
    text = traceback.format_exc()
pathlib.Path(sys.argv[2]).write_text(text)
"""


def run(code: str, free_port: int, folder: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> list[str]:
    """Run the code on two ranks; return what each wrote into its file."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*prefix, sys.executable, "-c", code, arguments[0], str(folder / str(rank)), *arguments[1:]],
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
    return [(folder / str(rank)).read_text() for rank in range(2)]


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_what_is_printed_without_standard_output_does_not_reach_shared_memory_or_connections(
    backend: str, free_port: int, tmp_path: Path
) -> None:
    closed = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    expected = f"{[[2.0]] * 3} {[True] * 3}"
    assert run(RANK, free_port, tmp_path, backend, prefix=closed) == [expected] * 2


@pytest.mark.parametrize(
    ("backend", "first", "sums"), [("gloo", "group", 6), ("ccl", "group", 6), ("ccl", "tensor", 7)]
)
def test_what_is_printed_after_standard_output_was_closed_does_not_either(
    backend: str, first: str, sums: int, free_port: int, tmp_path: Path
) -> None:
    assert run(CLOSING, free_port, tmp_path, backend, first) == [str([[2.0]] * sums)] * 2
