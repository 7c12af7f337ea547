"""Ranges of real operations on two ranks, as torch's profiler and a tool that reads NVTX see them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import comm_orchestrator as dist
from comm_utils.testing import RankPool, per_rank, run_ranks

Pools: TypeAlias = Callable[[int], RankPool]

LISTENER = Path(__file__).parent.parent / "packages/comm-collectives/tests/nvtx_listener.c"
CALLS = 3
#: What :func:`communicate` makes ``CALLS`` of.
EXPECTED = {
    "comm.all_reduce 256 B [0 1]",
    "comm.all_reduce 256 B [0 1] async",
    "comm.all_gather_into_tensor 512 B [0 1]",
    "comm.broadcast 256 B [0 1]",
    "comm.barrier [0 1]",
}


def communicate() -> None:
    part, whole = torch.ones(64), torch.ones(64 * dist.get_world_size())
    for _ in range(CALLS):
        with record_function("step"):
            dist.all_reduce(part)
            work = dist.all_reduce(part, async_op=True)
            assert work is not None
            work.wait()
            dist.all_gather_into_tensor(whole, part)
            dist.broadcast(part, 1)
            dist.barrier()
            (dist.send if dist.get_rank() == 0 else dist.recv)(part, 1 - dist.get_rank())


def expected() -> dict[str, int]:
    message = "comm.send 256 B [0 1]" if dist.get_rank() == 0 else "comm.recv 256 B [0 1]"
    return dict.fromkeys((*EXPECTED, message), CALLS)


def run_profiler() -> None:
    dist.configure(enabled=True, ranges=True)
    try:
        communicate()
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            communicate()
    finally:
        dist.configure(enabled=False, ranges=False)
    found = [event for event in prof.events() if event.name.startswith("comm.")]
    assert Counter(event.name for event in found) == expected()
    for event in found:
        assert event.is_user_annotation
        assert event.cpu_parent.name == "step", event.name

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        prof.export_chrome_trace(str(path))
        events = [one for one in json.loads(path.read_text())["traceEvents"] if one.get("ph") == "X"]
    ours = [one for one in events if one["name"].startswith("comm.")]
    assert Counter(one["name"] for one in ours) == expected()
    assert {one["cat"] for one in ours} == {"user_annotation"}
    steps = [one for one in events if one["name"] == "step"]
    for one in ours:
        assert any(step["ts"] <= one["ts"] and one["ts"] + one["dur"] <= step["ts"] + step["dur"] for step in steps), (
            one
        )

    with profile(activities=[ProfilerActivity.CPU]) as after:  # they are off
        communicate()
    assert not [event.name for event in after.events() if event.name.startswith("comm.")]


def test_profiler(pools: Pools) -> None:
    pools(2).run(run_profiler)


def run_nvtx(file: str) -> dict[str, int]:
    dist.init_distributed(dist_backend="gloo", verbose=False)
    dist.configure(enabled=True, ranges=True)
    communicate()
    dist.configure(ranges=False)
    communicate()
    pushed: Counter[str] = Counter()
    depth = 0
    for line in Path(file).read_text().splitlines():
        what, _, text = line.split("\t")
        depth += {"push": 1, "pop": -1}.get(what, 0)
        if what == "push":
            pushed[text] += 1
    assert depth == 0
    assert pushed == expected()
    dist.destroy_process_group()
    return dict(pushed)


@pytest.mark.skipif(
    not hasattr(torch._C, "_nvtx") and importlib.util.find_spec("nvtx") is None, reason="there is no NVTX here"
)
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_nvtx(tmp_path: Path, rank_environment: dict[str, Any]) -> None:
    library = tmp_path / "listener.so"
    subprocess.run(["cc", "-std=gnu99", "-shared", "-fPIC", "-o", library, LISTENER], check=True, timeout=60)
    files = [str(tmp_path / f"heard{rank}") for rank in range(2)]
    env = {
        **rank_environment,
        "NVTX_INJECTION64_PATH": str(library),
        "NVTX_LISTENER_FILE": per_rank(files),
    }
    sent, received = run_ranks(run_nvtx, 2, per_rank(files), env=env)
    assert sent["comm.send 256 B [0 1]"] == received["comm.recv 256 B [0 1]"] == CALLS


def run_shapes() -> list[tuple[str, list[Any]]]:
    peer = 1 - dist.get_rank()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        for dtype in (torch.float32, torch.int16, torch.complex64):
            tensor = torch.ones(2, 3, dtype=dtype, requires_grad=dtype is torch.float32)
            for transposed in (False, True):  # of which a copy is sent and received
                mine = torch.ones(3, 2, dtype=dtype).t() if transposed else tensor
                for _ in range(2):  # in the checked path and in the fast path
                    if peer:
                        dist.send(mine, peer)
                    else:
                        dist.recv(mine.detach(), peer)
            (dist.irecv(tensor.detach(), peer) if peer else dist.isend(tensor, peer)).wait()
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend if peer else dist.irecv, torch.ones(2, 3), peer)]):
            work.wait()
    return [(one.name, one.input_shapes[0]) for one in prof.events() if one.name in ("gloo:send", "gloo:recv")]


@pytest.mark.gloo("ccl has no ranges of its own")
def test_shapes_of_messages_are_those_of_the_caller(pools: Pools) -> None:
    first, second = pools(2).run(run_shapes)
    assert len(first) == len(second) == 16
    for found in (first, second):
        assert {(name, *shape) for name, shape in found} == {("gloo:send", 2, 3), ("gloo:recv", 2, 3)}
