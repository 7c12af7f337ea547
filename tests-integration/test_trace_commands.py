"""``commctl trace`` on traces of real jobs: what it says, draws and runs again, and what it leaves behind: nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import comm_orchestrator as dist
from comm_utils.observability.traces import Event, Operation, RankTrace
from comm_utils.observability.traces.file import load, save
from comm_utils.observability.traces.traffic import traffic
from comm_utils.testing import run_ranks

#: The libraries for CPU tensors that a replay can run on here.
USABLE = [name for name in ("ccl", "gloo") if dist.available_backends()[name].usable]
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

EVERYTHING = """
import sys
import torch
import comm_orchestrator as dist

dist.init_distributed("gloo", verbose=False)
rank, W = dist.get_rank(), dist.get_world_size()
outer = dist.new_group([0, 2])
dist.start_trace(sys.argv[1])

def parts(*shape, dtype=torch.float32):
    return [torch.ones(*shape, dtype=dtype) for _ in range(W)]

for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64):
    dist.broadcast(torch.ones(7, dtype=dtype), 1)
    if dtype not in (torch.bool, torch.complex64):
        dist.all_reduce(torch.ones(5, dtype=dtype), op="max")
dist.all_reduce(torch.ones(11), op="avg")
dist.all_reduce(torch.ones(0))
dist.all_reduce(torch.ones(300), log_name="gradients")
dist.all_reduce(torch.ones(3, dtype=torch.int16))
dist.inference_all_reduce(torch.ones(9))
dist.all_reduce_coalesced([torch.ones(2), torch.ones(5)])
dist.all_gather(parts(4), torch.ones(4))
dist.all_gather_into_tensor(torch.ones(6 * W), torch.ones(6))
dist.all_gather_coalesced([[torch.ones(2), torch.ones(3)] for _ in range(W)], [torch.ones(2), torch.ones(3)])
dist.reduce_scatter(torch.ones(4), parts(4))
dist.reduce_scatter_tensor(torch.ones(4), torch.ones(4 * W))
dist.reduce_scatter_coalesced([torch.ones(2 * W), torch.ones(3 * W)])
dist.all_to_all(parts(3), parts(3))
dist.all_to_all_single(torch.ones(2 * W), torch.ones(2 * W))
dist.all_to_all_single(torch.ones(W * (rank + 1)), torch.ones(sum(range(1, W + 1))), [rank + 1] * W, [1, 2, 3])
dist.reduce(torch.ones(8), 2)
dist.gather(torch.ones(5), parts(5) if rank == 0 else None, 0)
dist.scatter(torch.ones(5), parts(5) if rank == 1 else None, 1)
dist.barrier()
dist.broadcast_object_list([{"epoch": 1}, rank], 0)
if rank != 1:
    dist.all_reduce(torch.ones(1000), group=outer)
    dist.all_gather_into_tensor(torch.ones(20), torch.ones(10), group=outer)
    dist.broadcast(torch.ones(10), 2, group=outer)
works = [dist.all_reduce(torch.ones(2000), async_op=True) for _ in range(3)]
for work in reversed(works):
    work.wait()
dist.all_gather_into_tensor(torch.ones(30 * W), torch.ones(30), async_op=True).wait()
if rank == 0:
    dist.send(torch.ones(4), 1, tag=3)
    dist.isend(torch.ones(6), 2).wait()
    dist.recv(torch.ones(2), tag=9)
elif rank == 1:
    dist.recv(torch.ones(4), 0, tag=3)
    dist.send(torch.ones(2), 0, tag=9)
else:
    dist.irecv(torch.ones(6), 0).wait()
peer = torch.ones(8)
for work in dist.batch_isend_irecv([
    dist.P2POp(dist.isend, torch.ones(8), (rank + 1) % W), dist.P2POp(dist.irecv, peer, (rank - 1) % W)
]):
    work.wait()
dist.stop_trace()
dist.destroy_process_group()
"""

LATE = """
import sys, time
import torch
import comm_orchestrator as dist

dist.init_distributed("gloo", verbose=False)
dist.start_trace(sys.argv[1])
for step in range(6):
    if dist.get_rank() == 1:
        time.sleep(0.05)
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    time.sleep(0.15)
    work.wait()
    dist.all_gather_into_tensor(torch.ones(20), torch.ones(10))
dist.stop_trace()
dist.destroy_process_group()
"""


def recorded(folder: Path, program: str, ranks: int) -> Path:
    script = folder / "program.py"
    script.write_text(program)
    run_ranks(str(script), ranks, str(folder / "trace"), env={"CUDA_VISIBLE_DEVICES": ""})
    return folder / "trace"


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("everything"), EVERYTHING, 3)


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("late"), LATE, 2)


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def surroundings(rank_environment: dict[str, Any], tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment without a launcher, and an empty folder for temporary files, which is empty again afterwards."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    left_out = {*_LAUNCHER, "COLUMNS", *rank_environment}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    yield {**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    # torchrun keeps a folder for its own log.
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchelastic_")] == []


@pytest.fixture
def trace(surroundings: dict[str, str]) -> Run:
    def call(*arguments: object, by: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        launcher = by or (sys.executable, "-m", "comm_orchestrator")
        command = [*launcher, "trace", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=surroundings, timeout=120)

    return call


def test_summary_of_everything(trace: Run, everything: Path) -> None:
    done = trace("summary", everything, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    traces = load(everything)
    assert sum(row["calls"] for row in found["operations"]) == sum(len(one.events) for one in traces)
    assert found["unmatched"] <= 2, "the receive from anybody, and its send"
    for row in found["operations"]:
        assert row["waiting_s"] + row["transfer_s"] == pytest.approx(row["accounted_s"], abs=1e-9)
        assert row["accounted_s"] <= row["total_s"] + 1e-9
    assert {"gradients", "all_reduce", "irecv"} <= {row["name"] for row in found["operations"]}


def test_merged_trace_has_everything_once(trace: Run, everything: Path, tmp_path: Path) -> None:
    assert trace("merge", everything, "-o", tmp_path / "merged.json").returncode == 0
    document = json.loads((tmp_path / "merged.json").read_text())
    events = [event for one in load(everything) for event in one.events]
    phases: dict[str, int] = {}
    for event in document["traceEvents"]:
        phases[event["ph"]] = phases.get(event["ph"], 0) + 1
    later = [event for event in events if event.operation.asynchronous]
    assert phases["b"] == phases["e"] == len(later)
    assert phases["X"] == len(events) + sum(len(event.waits) for event in later)
    sends = sum(event.operation.operation in ("send", "isend") for event in events)
    assert phases["s"] == phases["f"] == sends - document["otherData"]["arrows_left_out"]
    assert document["otherData"]["groups"] == {"world": [0, 1, 2], "group [0, 2]": [0, 2]}


def test_pictures_of_everything(trace: Run, everything: Path, tmp_path: Path) -> None:
    for name, options in (("it.svg", ()), ("it.png", ("--kind", "timeline", "--ranks", "0,2", "--from", "0.001"))):
        done = trace("plot", everything, "-o", tmp_path / name, *options)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert (tmp_path / name).stat().st_size > 5000


def test_the_slow_rank_is_named(trace: Run, late: Path) -> None:
    found = json.loads(trace("summary", late, "--json").stdout)
    assert found["stragglers"][0]["rank"] == 1
    assert found["stragglers"][0]["caused_s"] > 5 * 0.05
    (reduced,) = (row for row in found["operations"] if row["name"] == "all_reduce")
    assert reduced["asynchronous"] == 12
    assert reduced["hidden_share"] > 0.5
    assert "rank 1" in trace("summary", late).stdout


@pytest.mark.parametrize("backend", USABLE)
def test_replay_moves_exactly_the_recorded_bytes(trace: Run, everything: Path, tmp_path: Path, backend: str) -> None:
    again = tmp_path / "again"
    again.mkdir()
    for name in ("rank_table.jsonl", "ranking.jsonl", "rank7.jsonl"):
        (again / name).write_text("of others, and of a larger trace")
    options = ("--backend", backend, "-o", again, "--json", tmp_path / "replay.json")
    done = trace("replay", everything, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in again.iterdir() if path.name[4] not in "012") == [
        "rank_table.jsonl",
        "ranking.jsonl",
    ]
    assert f"recorded on gloo, replayed on {backend}" in done.stdout
    assert "the replay has moved exactly the recorded bytes" in done.stdout
    document = json.loads((tmp_path / "replay.json").read_text())
    assert document["same"] is True
    assert document["notes"] == []
    before, after = load(everything), load(again)
    assert traffic(after).bytes_sent == traffic(before).bytes_sent
    for old, new in zip(before, after, strict=True):
        assert len(new.events) == len(old.events)
        # gloo has no reduce_scatter: what is recorded there is an exchange, with its splits.
        fields = ["size_bytes", "dtype", "asynchronous", "ranks", "tag"]
        for name in fields if backend == "ccl" else [*fields, "op", "input_splits", "output_splits"]:
            again = [getattr(event.operation, name) for event in new.events]
            assert again == [getattr(event.operation, name) for event in old.events], name
        assert [bool(event.waits) for event in new.events] == [bool(event.waits) for event in old.events]
        assert [event.operation.name == "gradients" for event in new.events].count(True) == 1


def test_replay_keeps_the_pauses_where_it_is_asked_to(trace: Run, late: Path, tmp_path: Path) -> None:
    done = trace("replay", late, "--keep-gaps", "--json", tmp_path / "it.json")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "it.json").read_text())
    assert document["keep_gaps"] is True
    assert document["replayed_wall_s"] > 6 * 0.15


THREADS = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
import comm_orchestrator as dist

dist.init_distributed("gloo", verbose=False)
groups = [dist.new_group([0, 1]) for _ in range(2)]
dist.start_trace(sys.argv[1])
with ThreadPoolExecutor(2) as threads:
    for step in range(5):
        # The ranks begin with another group each, and go on with the other while the first waits.
        order = groups if dist.get_rank() else groups[::-1]
        calls = []
        for group in order:
            begins = threading.Event()
            calls.append(threads.submit(lambda group, begins: (begins.set(), dist.barrier(group)), group, begins))
            begins.wait()
            if len(calls) == 1:
                time.sleep(0.05)
        for call in calls:
            call.result()
dist.stop_trace()
dist.destroy_process_group()
"""


def test_calls_of_two_threads_are_replayed_one_after_another(trace: Run, tmp_path: Path) -> None:
    folder = recorded(tmp_path, THREADS, 2)
    done = trace("replay", folder, "--timeout", "5")
    assert done.returncode == 0, done.stderr
    assert "the replay has moved exactly the recorded bytes" in done.stdout


def test_a_recording_that_was_cut_off_is_replayed_as_far_as_all_ranks_have_it(
    trace: Run, late: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    for path in late.iterdir():
        (cut / path.name).write_text(path.read_text())
    lines = (late / "rank1.jsonl").read_text().splitlines(keepends=True)
    (cut / "rank1.jsonl").write_text("".join(lines[:-4]) + lines[-4][:7])
    done = trace("replay", cut, "-o", tmp_path / "again")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out, on rank" in done.stdout
    assert "the recording of rank 1 was cut off" in done.stdout
    first, second = load(tmp_path / "again")
    assert 0 < len(first.events) == len(second.events) < 12


def torchrun(ranks: int) -> tuple[str, ...]:
    runner = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return *runner, "-m", "comm_orchestrator"


def test_replay_under_a_launcher(trace: Run, late: Path, tmp_path: Path) -> None:
    done = trace("replay", late, "-o", tmp_path / "again", "--json", tmp_path / "it.json", by=torchrun(2))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("exactly the recorded bytes") == 1
    document = json.loads((tmp_path / "it.json").read_text())
    assert document["same"] is True
    assert document["rows"][0]["replayed_waiting_s"] is not None
    assert traffic(load(tmp_path / "again")).bytes_sent == traffic(load(late)).bytes_sent


def test_a_launcher_with_another_number_of_ranks_is_told(surroundings: dict[str, str], late: Path) -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-m", "comm_orchestrator", "trace", "replay", str(late)]
    done = subprocess.run(command, capture_output=True, text=True, env={**surroundings, **launched}, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the trace has 2 ranks and the launcher has started 1; start 2\n"


@pytest.mark.parametrize(
    ("local_rank", "said"), [("0", "error: rank 1: {}: there is no such folder; expected"), ("1", "")]
)
def test_a_mistake_of_another_host_is_reported_there(
    surroundings: dict[str, str], tmp_path: Path, local_rank: str, said: str
) -> None:
    launched = {"RANK": "1", "LOCAL_RANK": local_rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    launched["MASTER_PORT"] = "1"
    missing = tmp_path / "missing"
    command = [sys.executable, "-m", "comm_orchestrator", "trace", "replay", str(missing)]
    done = subprocess.run(command, capture_output=True, text=True, env={**surroundings, **launched}, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.partition(" a folder")[0] == said.format(missing)


def stuck(folder: Path) -> Path:
    """A trace that nobody can have recorded: both ranks wait for the other to send first."""
    for rank in range(2):
        events = []
        for number, name in enumerate(("recv", "send")):
            operation = Operation(name, name, 64, (0, 1), "0", "float32", root=1 - rank)
            events.append(Event(operation, 0, number * 100, number * 100 + 10, number * 100 + 10))
        save(folder / "stuck", RankTrace(rank, 2, "host", rank, "gloo", events=events))
    return folder / "stuck"


def ranks_left(mark: Path) -> list[int]:
    """Processes that were started for the trace in the folder ``mark``."""
    found = []
    for one in Path("/proc").iterdir():
        if one.name.isdecimal() and int(one.name) != os.getpid():
            try:
                line = (one / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if "replay_rank" in line and str(mark) in line:
                found.append(int(one.name))
    return found


SLOW = pytest.mark.slow


@pytest.mark.parametrize("backend", [pytest.param("ccl", marks=SLOW), "gloo"])
def test_a_replay_that_cannot_go_on_ends_with_a_reason(trace: Run, tmp_path: Path, backend: str) -> None:
    if backend not in USABLE:
        pytest.skip(f"{backend} cannot be used here")
    done = trace("replay", stuck(tmp_path), "--backend", backend, "--timeout", "2")
    assert done.returncode == 1
    assert done.stdout == ""
    # Either rank may be the first whose time is up; the command shows rank 0's error.
    assert re.search(r"timed out (after 2 s|waiting for rank 0)", done.stderr)
    assert "Traceback" not in done.stderr
    assert ranks_left(tmp_path) == []


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(one, marks=SLOW) for one in (signal.SIGTERM, signal.SIGKILL))]
)
def test_ranks_end_with_the_command(surroundings: dict[str, str], tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "comm_orchestrator", "trace", "replay", str(stuck(tmp_path)), "--timeout", "300"]
    process = subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 60
        while len(ranks_left(tmp_path)) < 2:
            assert time.monotonic() < until, "the ranks have not started"
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        time.sleep(1)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert (out, err) == ("", "interrupted\n" if number == signal.SIGINT else "")
    until = time.monotonic() + 10
    while ranks_left(tmp_path):
        assert time.monotonic() < until, "ranks outlive the command"
        time.sleep(0.1)
    if number == signal.SIGKILL:  # nobody could remove its files
        for path in (tmp_path / "temporary").glob("comm-replay-*/*/*"):
            path.unlink()
        for depth in ("comm-replay-*/*", "comm-replay-*"):
            for path in (tmp_path / "temporary").glob(depth):
                path.rmdir()


def test_a_rank_that_is_killed_is_named(surroundings: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "comm_orchestrator", "trace", "replay", str(stuck(tmp_path)), "--timeout", "300"]
    process = subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 60
        while len(ranks_left(tmp_path)) < 2:
            assert time.monotonic() < until, "the ranks have not started"
            time.sleep(0.1)
        os.kill(ranks_left(tmp_path)[0], signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert out == ""
    assert "ended with signal SIGKILL; all others were ended" in err
    assert ranks_left(tmp_path) == []
