"""``commctl top`` on the rings of real processes, on a pipe and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_orchestrator.tools.commands import app
from comm_orchestrator.tools.top.rows import size_bytes
from comm_utils.flight_recorder import Call, RingGroup, open_ring, rings_in
from comm_utils.testing import run_ranks
from comm_utils.testing.recording import call, writers

STEP = [call("done", "broadcast", 8, root=0)]
HANGS = call("open", "all_gather", 1024, caller="train_step")


def top(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "argv", ["commctl", "top", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        app()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out or captured.err


def as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> dict[int, dict[str, Any]]:
    shown = json.loads(top(monkeypatch, capsys, *arguments, "--json")[1])
    return {row["rank"]: row for row in shown["ranks"]}


def test_who_waits_for_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    message = call("open", "recv", 4, peer=0, tag=5)
    in_background = call("open", "all_reduce", background=True)
    plans = {0: [*STEP, HANGS], 1: [*STEP, HANGS], 2: STEP, 3: [*STEP, message], 4: [*STEP, in_background]}
    with writers(tmp_path, plans) as ranks:
        ranks[2].stop()
        time.sleep(0.2)
        rows = as_json(monkeypatch, capsys, tmp_path, "--interval", "0.1")
        code, shown = top(monkeypatch, capsys, tmp_path, "--once", "--interval", "0.1")
    assert code == 0
    assert [rows[rank]["waits_for"] for rank in range(5)] == [[2, 3], [2, 3], [], [0], []]
    assert [rows[rank]["state"] for rank in (0, 2)] == ["alive", "stopped"]
    assert [rows[rank]["call"] for rank in range(5)] == ["all_gather", "all_gather", "", "recv", ""]
    assert rows[0]["size_bytes"] == 1024 * 4 * 5
    assert rows[0]["caller"] == "train.py:2 train_step"
    assert 0.2 < rows[0]["since_s"] < 60
    assert rows[0]["calls_per_s"] == rows[0]["bytes_per_s"] == 0
    lines = [line.split() for line in shown.splitlines()]
    assert next(line for line in lines if line[:2] == ["0", str(ranks[0].pid)])[-3:] == ["ranks", "2,", "3"]
    assert "20 KiB" in shown


def test_ranks_that_have_come_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    barrier = partial(call, operation="barrier", elements=0, group="world (monitored barrier)", dtype="")
    # The last rank to come to a monitored barrier records nothing, so its ranks have different numbers of calls.
    plans = {0: [barrier("done"), barrier("open")], 1: [barrier("open")], 2: [barrier("done")]}
    with writers(tmp_path / "barrier", plans):
        rows = as_json(monkeypatch, capsys, tmp_path / "barrier", "--interval", "0.1")
    assert [rows[rank]["waits_for"] for rank in range(3)] == [[2], [2], []]
    with writers(tmp_path / "message", {0: [call("open", "send", peer=1)], 1: [call("open", "recv", peer=0)]}):
        rows = as_json(monkeypatch, capsys, tmp_path / "message", "--interval", "0.1")
    assert [rows[rank]["waits_for"] for rank in range(2)] == [[], []]


def test_a_collective_before_many_of_another_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    others = ["group", "others", [1, 2]]
    many = [call("done", "all_reduce", group="others") for _ in range(100)]
    plans = {0: [call("open", "broadcast", root=1)], 1: [others, *STEP, *many], 2: [others, *many]}
    with writers(tmp_path, plans):
        rows = as_json(monkeypatch, capsys, tmp_path, "--interval", "0.1")
    assert rows[0]["waits_for"] == [2]


def test_rates(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    repeated = ["repeat", 0.01, call("done", "all_reduce", 1000, dtype="bfloat16")]
    with writers(tmp_path, {0: [repeated], 1: STEP}):
        rows = as_json(monkeypatch, capsys, tmp_path, "--interval", "1")
    assert 5 <= rows[0]["calls_per_s"] <= 100
    assert rows[0]["bytes_per_s"] == pytest.approx(rows[0]["calls_per_s"] * 2000)
    assert rows[1]["calls_per_s"] == 0


def test_more_calls_than_the_ring_keeps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with writers(tmp_path, {0: [["repeat", 0, call("done", "all_reduce", 100)]]}, records=32):
        rows = as_json(monkeypatch, capsys, tmp_path, "--interval", "0.5")
    assert rows[0]["calls_per_s"] > 64
    assert rows[0]["bytes_per_s"] == pytest.approx(rows[0]["calls_per_s"] * 400)


def test_a_job_that_runs_is_preferred(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with writers(tmp_path, {0: STEP}, job="runs"), writers(tmp_path, {0: STEP}, job="has-ended") as ended:
        ended[0].kill()
        assert top(monkeypatch, capsys, tmp_path, "--once", "--interval", "0.1")[1].startswith("job runs of 1 rank")


def test_without_rings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, shown = top(monkeypatch, capsys, tmp_path)
    assert code == 2
    assert "no rings" in shown


def test_damaged_and_missing_rings_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with writers(tmp_path, {0: STEP, 1: STEP, 2: STEP}) as ranks:
        damaged, missing = rings_in(tmp_path)[1:]
        damaged.write_bytes(bytes(9000))
        missing.unlink()
        shown = top(monkeypatch, capsys, tmp_path, "--once", "--interval", "0.1")[1]
        for one in ranks:
            one.kill()
    assert f"damaged: {damaged}: not a ring" in shown
    assert "no ring: ranks 1, 2 (damaged, of another host, or ended)" in shown


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_on_a_terminal(tmp_path: Path, key: bytes) -> None:
    with writers(tmp_path, {0: [*STEP, HANGS], 1: STEP}):
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "comm_orchestrator", "top", str(tmp_path), "--interval", "0.2"]
        environment = {**os.environ, "COLUMNS": "120", "LINES": "40", "TERM": "xterm"}
        process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
            preexec_fn=_foreground,
        )
        os.close(theirs)
        try:
            shown = _read_until(ours, "rank 1(?s:.*)rank 1")  # shown twice
            os.write(ours, key)
            _read_until(ours, None)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
            os.close(ours)
    assert "q ends" in shown
    assert "all_gather" in shown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(tmp_path: Path, number: signal.Signals) -> None:
    with writers(tmp_path, {0: STEP}):
        ours, theirs = pty.openpty()
        program = [sys.executable, "-m", "comm_orchestrator", "top", str(tmp_path), "--interval", "0.2"]
        # Under nohup, tests and their programs ignore SIGHUP.
        command = ["env", "--default-signal=HUP", *program]
        before = termios.tcgetattr(theirs)
        with subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
        ) as process:
            try:
                _read_until(ours, "q ends")
                process.send_signal(number)
                _read_until(ours, re.escape("\x1b[?1049l"))
                assert process.wait(30) == -number
            finally:
                process.kill()
        assert termios.tcgetattr(theirs) == before
        os.close(theirs)
        os.close(ours)


def test_in_the_background_of_a_terminal(tmp_path: Path) -> None:
    """As of ``timeout 60 commctl top`` in a shell: it shows the job, and a signal ends it."""
    with writers(tmp_path, {0: STEP}):
        ours, theirs = pty.openpty()
        program = [sys.executable, "-m", "comm_orchestrator", "top", str(tmp_path), "--interval", "0.2"]
        shell = ["bash", "-c", 'set -m; "$@" & echo "started $!."; wait $!', "bash", *program]
        environment = {**os.environ, "TERM": "xterm"}
        started: list[str] = []
        with subprocess.Popen(
            shell, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, preexec_fn=_lead_session
        ) as process:
            try:
                before = termios.tcgetattr(theirs)
                started = re.findall(r"started (\d+)\.", _read_until(ours, r"started (\d+)\."))
                _read_until(ours, "q ends")
                os.kill(int(started[0]), signal.SIGTERM)
                assert process.wait(30) == 128 + signal.SIGTERM
                assert termios.tcgetattr(theirs) == before
            finally:
                process.kill()
                for pid in started:
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
        os.close(theirs)
        os.close(ours)


def _lead_session() -> None:
    os.setsid()
    _foreground()


def _foreground() -> None:
    """Make the terminal on stdin the controlling one, so that Ctrl-C is a signal."""
    import fcntl

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read_until(descriptor: int, pattern: str | None) -> str:
    """Read what a terminal shows until ``pattern`` is seen, or, if None, until its other side is closed."""
    found, deadline = "", time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([descriptor], [], [], 1)[0]:
            continue
        try:
            data = os.read(descriptor, 65536)
        except OSError:
            data = b""
        if not data:
            if pattern is None:
                return found
            break
        found += data.decode(errors="replace")
        if pattern is not None and re.search(pattern, found):
            return found
    pytest.fail(f"no {pattern!r} in {found!r}")


@pytest.mark.parametrize(
    ("operation", "dtype", "op", "elements", "expected"),
    [
        ("all_reduce", "float32", "sum", 10, 40),
        ("all_gather", "bool", "", 10, 40),
        ("all_to_all_single", "float8_e4m3fn", "", 10, 40),
        ("all_to_all_single", "float32", "sum", 10, 160),
        ("send", "complex128", "", 1, 16),
        ("barrier", "", "", 0, 0),
        ("of_a_plugin", "int8", "", 1, 0),
    ],
)
def test_sizes(operation: str, dtype: str, op: str, elements: int, expected: int) -> None:
    made = Call(0, 1, 1, 0, False, RingGroup("g", (0, 1, 2, 3)), operation, "", dtype, op, -1, -1, 0, elements, 1, 0)
    assert size_bytes(made) == expected


def run_calls(folder: str) -> None:
    dist.init_distributed("gloo", verbose=False, config={"flight_recorder": {"directory": folder}})
    W = dist.get_world_size()
    dist.configure(enabled=True)
    (path,) = (one for one in rings_in(Path(folder)) if one.name.startswith(f"rank-{dist.get_rank()}."))
    reader = open_ring(path)
    part, whole = torch.ones(5), torch.ones(5 * W)
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(part),
        lambda: dist.all_gather_into_tensor(whole, part),
        lambda: dist.reduce_scatter_tensor(part, whole),
        lambda: dist.reduce_scatter(part, list(whole.view(W, -1).unbind())),
        lambda: dist.gather(part, list(whole.view(W, -1).unbind()) if dist.get_rank() == 1 else None, 1),
        lambda: dist.all_to_all_single(whole, whole.clone()),
    ]
    for one in calls:
        dist.reset_log()
        before = reader.count()
        one()
        reader.refresh()
        (made,), (row,) = reader.calls(after=before), dist.log_rows()
        assert (made.name, size_bytes(made)) == (row.name, row.size_bytes)
    reader.close()
    dist.destroy_process_group()


def test_sizes_are_those_of_the_logger(tmp_path: Path) -> None:
    run_ranks(run_calls, 3, str(tmp_path))
