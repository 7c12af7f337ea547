"""``commctl bench`` for real: ranks of its own, under a launcher, beside other libraries, and where something fails."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import comm_orchestrator as dist
from comm_utils import operations
from comm_utils.observability.bench_results import load
from comm_utils.testing import patience, run_ranks

BENCH = (sys.executable, "-m", "comm_orchestrator", "bench")
QUICK = ("-n", "2", "-w", "1", "--rounds", "2")
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
USABLE = [name for name in ("gloo", "ccl") if dist.available_backends()[name].usable]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(rank_environment: dict[str, Any]) -> dict[str, str]:
    left_out = {*_LAUNCHER, *rank_environment}
    return {
        **{name: value for name, value in os.environ.items() if name not in left_out},
        **{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    }


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Run:
    def call(*options: str, by: Sequence[str] = BENCH) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*by, *options], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
        )

    return call


def lines(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """The cells of the table."""
    return [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]


def test_every_operation_on_every_library(run: Run, tmp_path: Path) -> None:
    backends = ("--backend", ",".join(USABLE), "--peers", "torch")
    files = ("--json", "a.json", "--csv", "a.csv", "--plot", "a.svg")
    done = run("all", "-b", "64", "-e", "4K", "-f", "64", *QUICK, *backends, *files)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    found = load(tmp_path / "a.json")
    libraries = [*(("ours", name) for name in USABLE), ("torch", "gloo")]
    for library in libraries:
        own = [one for one in found.results if (one.library, one.backend) == library]
        assert {one.operation for one in own} == set(operations.benchmarked())
        ways = {one.operation: {other.way for other in own if other.operation == one.operation} for one in own}
        assert ways["all_reduce"] == ways["broadcast"] == {"in_place"}
        assert ways["all_gather_into_tensor"] == ways["reduce_scatter_tensor"] == {"in_place", "out_of_place"}
    assert all(one.wrong == (None if one.operation == "barrier" else 0) for one in found.results)
    assert all(len(one.rounds_us) == 2 and one.time_us > 0 and one.world_size == 2 for one in found.results)
    assert {one.size_bytes for one in found.results} == {0, 64, 4096}
    assert found.system["hosts"][0]["ranks"] == [0, 1]
    assert len(lines(done)) == len(libraries) * (9 * 2 + 1)
    assert "# Out of bounds values : 0 OK" in done.stdout
    with (tmp_path / "a.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(found.results)
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.csv", "a.json", "a.svg"]


def test_groups_at_once_types_reductions_roots_and_single_calls(run: Run, tmp_path: Path) -> None:
    what = ("reduce", "send", "-d", "half,int64", "-o", "max,prod", "-r", "all", "-I")
    done = run(*what, "-b", "256", "-e", "256", *QUICK, "--ranks", "4", "--group-size", "2", "-J", "a.json", "-a", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    found = load(tmp_path / "a.json").results
    reduced = [(one.dtype, one.op, one.root) for one in found if one.operation == "reduce"]
    assert reduced == [
        (dtype, op, root) for dtype in ("float16", "int64") for op in ("max", "product") for root in (0, 1)
    ]
    assert {(one.world_size, one.groups, one.nodes, one.wrong) for one in found} == {(2, 2, 1, 0)}
    assert all(one.min_us <= one.p50_us <= one.p95_us <= one.p99_us <= one.max_us for one in found)
    assert "p99" in done.stdout
    assert [len(cells) for cells in lines(done)] == [5 + 2 * 8] * len(found)


def test_all_reductions_leave_out_what_does_not_exist(run: Run, tmp_path: Path) -> None:
    types = ("-d", "bfloat16,uint16,int64", "-o", "all")
    done = run(*types, "-b", "64", "-e", "64", *QUICK, "--peers", "torch", "--json", "a.json")
    assert done.returncode == 0, done.stdout + done.stderr
    ours = {(one.dtype, one.op) for one in load(tmp_path / "a.json").results if one.library == "ours"}
    assert {("bfloat16", "avg"), ("uint16", "product"), ("int64", "min")} <= ours
    assert ("int64", "avg") not in ours
    # What the versions of torch lack differs; none of them has this.
    assert "# note: torch on gloo does not do all_reduce in place uint16 sum" in done.stdout


def test_compressed_calls_beside_uncompressed_ones(run: Run, tmp_path: Path) -> None:
    what = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "-d", "float,int32")
    codecs = ("--compression", "none,int8,onebit", "--backend", ",".join(USABLE))
    files = ("--json", "a.json", "--csv", "a.csv", "--plot", "a.svg")
    done = run(*what, "-b", "64K", "-e", "64K", *QUICK, *codecs, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    found = load(tmp_path / "a.json")
    assert found.options["compressions"] == ["none", "int8", "onebit"]
    moving = {"all_gather_into_tensor", "all_to_all_single"}
    served = {
        "": {"all_reduce", "reduce_scatter_tensor", "broadcast", *moving},
        "int8(block_size=256)": {"all_reduce", "reduce_scatter_tensor", *moving},
        "onebit(block_size=128)+error_feedback": {"all_reduce", "reduce_scatter_tensor"},
    }
    for backend in USABLE:
        own = [one for one in found.results if one.backend == backend]
        assert {codec: {one.operation for one in own if one.codec == codec} for codec in served} == served
        assert {one.dtype for one in own if one.codec} == {"float32"}
    for one in found.results:
        factor = {"all_reduce": 1.0, "broadcast": 1.0}.get(one.operation, 0.5)
        # Bandwidths are those of what is asked for, whatever travels.
        assert one.busbw_gb_per_s == pytest.approx(one.size_bytes / one.time_us / 1e3 * factor)
        if not one.codec:
            assert (one.wire_bytes, one.wrong) == (0, 0)
        elif "int8" in one.codec:
            assert one.wire_bytes == pytest.approx(factor * one.size_bytes * 1.015625 / 4, rel=0.001)
            assert one.wrong == 0
        else:
            assert 0 < one.wire_bytes < factor * one.size_bytes / 25
            assert one.wrong is None  # with error feedback, only the sum of many calls is near the exact one
    assert "wire" in done.stdout
    assert "# note: ours with int8(block_size=256) on gloo does not do broadcast" in done.stdout
    with (tmp_path / "a.csv").open(newline="") as file:
        assert [row["wire_bytes"] for row in csv.DictReader(file)] == [str(one.wire_bytes) for one in found.results]
    assert "int8" in (tmp_path / "a.svg").read_text()
    # Codecs are compared with themselves.
    compare = ("--compression", "int8", "--compare", "a.json", "--tolerance", "1000")
    again = run("-b", "64K", "-e", "64K", *QUICK, "--backend", "gloo", *compare)
    assert "# 1 compared, 0 slower" in again.stdout, again.stdout + again.stderr


def test_an_exported_compression_is_ignored(environment: dict[str, str], run: Run) -> None:
    environment["COMM_COMPRESS_COMMUNICATION"] = '{"method": "int8", "min_size_bytes": 0}'
    done = run("all_reduce", "-b", "64K", "-e", "64K", *QUICK)
    assert (done.returncode, done.stderr) == (0, "")
    assert "# Out of bounds values : 0 OK" in done.stdout  # plain results are exact


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--compression", "int7"), "--compression: compression: got 'int7'; expected one of "),
        (("broadcast", "--compression", "int8"), "--compression: got int8 for broadcast; expected one of all_reduce"),
        (("--compression", "int8,"), "--compression: got 'int8,'; expected names with a comma between them"),
    ],
)
def test_compression_that_cannot_be_is_refused_before_ranks_start(
    run: Run, options: tuple[str, ...], message: str
) -> None:
    done = run(*options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_beside_deepspeed(run: Run, tmp_path: Path) -> None:
    done = run("all", "-b", "64", "-e", "4K", "-f", "64", *QUICK, "--peers", "deepspeed", "--json", "a.json")
    assert done.returncode == 0, done.stdout + done.stderr
    own = [one for one in load(tmp_path / "a.json").results if one.library == "deepspeed"]
    assert {one.operation for one in own} == set(operations.benchmarked())
    assert done.stdout.startswith("# comm-orchestrator")


@pytest.mark.slow
def test_under_torchrun_rank_0_alone_prints(run: Run) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    by = (*torchrun, "-m", "comm_orchestrator", "bench")
    done = run("-b", "64", "-e", "64", *QUICK, by=by)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines(done)) == 1
    refused = run("--ranks", "2", by=by)
    assert refused.returncode == 1  # torchrun's own
    assert refused.stderr.count("error: --ranks: got 2, and torchrun has started the ranks") == 1


# --- findings


WRONG = """
import sys
from comm_orchestrator.tools.bench import libraries, rank
from comm_orchestrator.tools.bench.libraries.torch_like import open_ours
from comm_orchestrator.tools.bench.options import Options

class Wrong:
    def __init__(self, backend, group):
        self.right = open_ours(backend, group)
        self.name, self.backend, self.device = "wrong", backend, self.right.device
        self.compression = None

    def call(self, row, way, source, target):
        function, arguments = self.right.call(row, way, source, target)
        state = {"calls": 0}
        def call():
            state["calls"] += 1
            if sys.argv[1] == "stale" and state["calls"] > 3:
                return
            function(*arguments)
            if sys.argv[1] == "last":
                target.view(-1)[-1] += 1
        return call, ()

    def close(self):
        self.right.close()

libraries.register("torch", Wrong)
code = rank.run(Options.loads(sys.argv[2]))
print("code", code)
"""


@pytest.mark.parametrize(
    ("operation", "how"),
    [
        ("all_reduce", "stale"),
        ("all_gather_into_tensor", "last"),
        ("all_to_all_single", "stale"),
        ("all_reduce", "not"),
    ],
)
def test_wrong_results_are_found(operation: str, how: str, tmp_path: Path, rank_environment: dict[str, Any]) -> None:
    from comm_orchestrator.tools.bench.options import Options

    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    options = Options(
        (operation,), 64, 64, iters=2, warmup_iters=1, rounds=2, peers=("torch",), json=str(tmp_path / "a")
    )
    out = run_ranks(str(script), 2, how, options.dumps(), timeout_s=100, env=rank_environment)
    found = load(tmp_path / "a").results
    assert {one.wrong for one in found if one.library == "ours"} == {0}
    ways = [one.wrong for one in found if one.library == "wrong"]
    assert ways
    assert all(wrong is not None and (wrong > 0) == (how != "not") for wrong in ways)
    assert all(f"code {int(how != 'not')}" in text for text in out)
    assert ("FAILED" in out[0]) == (how != "not")


def test_compared_with_an_earlier_run(run: Run, tmp_path: Path) -> None:
    def again(factor: float) -> subprocess.CompletedProcess[str]:
        document = json.loads((tmp_path / "a.json").read_text())
        for one in document["results"]:
            one["time_us"] *= factor
            one["rounds_us"] = [factor * time_us for time_us in one["rounds_us"]]
        (tmp_path / "b.json").write_text(json.dumps(document))
        return run("-b", "64", "-e", "128", *QUICK, "--compare", "b.json", "--tolerance", "50%")

    assert run("-b", "64", "-e", "64", *QUICK, "--json", "a.json").returncode == 0
    done = again(1e-6)
    assert done.returncode == 1
    assert "1 compared, 1 slower, 0 faster : FAILED" in done.stdout
    assert re.search(r"# only now: .* 128 B", done.stdout)
    done = again(1e6)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 compared, 0 slower, 1 faster : OK" in done.stdout


# --- refused, before anything starts


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["-f", "2", "-i", "8"], "--stepfactor 2 and --stepbytes 8; expected one of them"),
        (["--tolerance", "5%"], "--tolerance: got 5% without --compare"),
        (["-e", "900T"], "GiB are free"),
        (["--ranks", "4", "--group-size", "3"], "--group-size: got 3 among 4 ranks"),
        (["--backend", "goo"], "--backend: got 'goo'; expected some of"),
        (["--peers", "mpi4py"], "--peers: "),
        (["--plot", "a.pdf"], "expected a file that ends in .png or .svg"),
        (["--json", "none/a.json"], "there is no folder"),
        (["--json", "a.svg", "--plot", "a.svg"], "got the same file twice"),
        (["--compare", "none.json"], "--compare: none.json: No such file or directory"),
        (["barrier", "--plot", "a.svg"], "got barrier, which has no size"),
        (["all_gather", "-b", "8", "-e", "8"], "nothing is left to measure"),
        (["-I", "7"], "--per_iter_timing: got 7; expected 0 or 1"),
    ],
)
def test_wrong_usage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], told: str) -> None:
    from typer.testing import CliRunner

    from comm_orchestrator.tools.commands import app

    for name in _LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", *options])
    assert done.exit_code == 2, done.output
    assert "error: " in done.output
    assert told in done.output
    assert not list(tmp_path.iterdir())


def test_wrong_usage_starts_nothing_and_prints_one_line(run: Run) -> None:
    done = run("--ranks", "4", "--group-size", "3")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr


def test_matplotlib_is_asked_for_before_anything_is_measured(run: Run, tmp_path: Path) -> None:
    hidden = (
        "import sys; from importlib.machinery import PathFinder; find = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, *rest: None if name == 'matplotlib' else find(name, *rest)\n"
        "from comm_orchestrator.tools.cli import main; sys.argv[0] = 'commctl'; main()"
    )
    done = run("bench", "--plot", "a.svg", by=(sys.executable, "-c", hidden))
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs matplotlib; install it with: pip install 'comm-orchestrator[plot]'" in done.stderr


# --- failures


ENDLESS = ("-b", "64K", "-e", "64K", "-n", "100000", "--rounds", "1000")


def started(environment: dict[str, str], *options: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A bench that measures, and the pids of its ranks."""
    process = subprocess.Popen(
        [*BENCH, *ENDLESS, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pids: list[int] = []
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(r"#  Rank +\d+ .* Pid +(\d+) ", line):
            pids.append(int(match[1]))
        if len(pids) == 2:
            break
    return process, pids


def gone(pids: list[int], within_s: float = 10) -> bool:
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_to_end(environment: dict[str, str], number: signal.Signals) -> None:
    process, pids = started(environment)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (128 + number, "interrupted\n" if number == signal.SIGINT else "")
    assert gone(pids)


def test_a_rank_that_dies_ends_all(environment: dict[str, str]) -> None:
    process, pids = started(environment)
    os.kill(pids[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"error: rank 1 (pid {pids[1]}) ended with signal SIGKILL; all others were ended" in errors
    assert "Traceback" not in errors
    assert gone(pids)


def test_ranks_do_not_outlive_whoever_started_them(environment: dict[str, str]) -> None:
    process, pids = started(environment)
    process.kill()
    process.communicate(timeout=30)
    assert gone(pids)


def test_a_line_that_takes_too_long(environment: dict[str, str]) -> None:
    process, pids = started(environment, "--timeout", "1")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: rank 0: all_reduce of 65536 bytes took longer than --timeout 1 s" in errors
    assert gone(pids)


@pytest.mark.parametrize("files", [(), ("--json", "a.json")], ids=["table", "file"])
def test_a_reader_that_has_seen_enough(environment: dict[str, str], tmp_path: Path, files: Sequence[str]) -> None:
    """All ranks end after the line that they measure; where there is a file to write, they go on without a table."""
    files = [str(tmp_path / one) if one.endswith(".json") else one for one in files]
    process, pids = started(environment, "-n", "1", "--rounds", "1", "-e", "1M", *files)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60 * patience()), errors) == (0, "")
    assert gone(pids)
    if files:
        assert load(tmp_path / "a.json").results[-1].size_bytes == 1 << 20


def test_a_reader_of_one_line_under_torchrun(environment: dict[str, str]) -> None:
    launched = "-m torch.distributed.run --standalone --nproc-per-node 2 -m comm_orchestrator bench"
    line = f"set -o pipefail; {sys.executable} {launched} -b 8 -e 1K {' '.join(QUICK)} | head -n 1"
    limit_s = 120 * patience()
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr  # torch may warn
    assert done.stdout.startswith("# comm-orchestrator")


def test_a_progress_bar_in_a_terminal_only(environment: dict[str, str]) -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [*BENCH, "-b", "64", "-e", "128", *QUICK],
        env={**environment, "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    )
    os.close(terminal)
    out, _ = process.communicate(timeout=100)
    shown = b""
    while select.select([controller], [], [], 1)[0]:
        try:
            shown += os.read(controller, 65536)
        except OSError:  # nobody has the other end any more
            break
    os.close(controller)
    assert process.returncode == 0
    assert b"all_reduce 64 B" in shown
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")  # the cursor is back
    assert "\x1b" not in out
