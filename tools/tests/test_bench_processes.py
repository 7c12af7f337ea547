"""The ranks of the benchmarks: started again where they hang, and never left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import logger  # noqa: E402
import measuring  # noqa: E402
import startup  # noqa: E402
from peers.catalogue import Peer  # noqa: E402
from peers.processes import started  # noqa: E402

# A rank that answers what it is asked; rank 0 hangs at its start as often as "hangs" says, and notes its pid.
RANK = """
import json, os, pathlib, socket, sys, time
options, rank = json.loads(sys.argv[2]), int(os.environ["RANK"])
sock = socket.socket(socket.AF_UNIX)
sock.connect(options["socket"])
answers, questions = sock.makefile("w"), sock.makefile("r")
def say(found): print(json.dumps(found), file=answers, flush=True)
say({"rank": rank, "pid": os.getpid()})
log = pathlib.Path(options["log"])
if rank == 0:
    with log.open("a") as file: print(os.getpid(), file=file)
    if len(log.read_text().split()) <= options["hangs"]: time.sleep(600)
say({})
while line := questions.readline().strip():
    say({"cpu_ns": [0, 0], "rank": rank, **json.loads(line)})
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return path


def pids(log: Path) -> list[str]:
    return log.read_text().split()


def test_ranks_that_hang_at_the_start_are_started_again(program: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    options = {"log": str(tmp_path / "log"), "hangs": 1}
    with started([Peer("it", "")], 2, options, notes.append, program, attempts=2, limit_s=3) as (one,):
        assert notes == ["it was not ready after 3 s, and was started again"]
        assert [answer["rank"] for answer in one.ask({"a": 1})] == [0, 1]
    assert len(pids(tmp_path / "log")) == 2
    assert not any(Path("/proc", pid).exists() for pid in pids(tmp_path / "log"))


def test_after_the_last_attempt_the_run_ends_and_leaves_nothing(program: Path, tmp_path: Path) -> None:
    options = {"log": str(tmp_path / "log"), "hangs": 9}
    with (
        pytest.raises(SystemExit, match="it did not start: it was not ready after 1 s"),
        started([Peer("it", "")], 2, options, print, program, attempts=2, limit_s=1),
    ):
        pass
    assert len(pids(tmp_path / "log")) == 2
    assert not any(Path("/proc", pid).exists() for pid in pids(tmp_path / "log"))


def test_the_interval_is_that_of_the_statistic() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 50.0]
    lower, upper = measuring.interval(lambda some: sum(values[one] for one in some) / len(some), len(values))
    assert 1.0 < lower < 12.0 < upper < 50.0
    assert measuring.interval(lambda some: float(len(some)), 3) == (3.0, 3.0)


# Rank 1 fails, for which rank 0 waits.
RANK_1_FAILS = """
import os, sys, time
if os.environ["RANK"] == "1": sys.exit(3)
time.sleep(600)
"""


def test_the_start_of_ranks_ends_with_the_one_that_failed() -> None:
    with pytest.raises(SystemExit, match="rank 1 ended with exit status 3, expected 0"):
        startup.once(RANK_1_FAILS, 2)


def test_steps_with_the_logger_end_with_the_rank_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "programs", lambda *_, **__: {"it": RANK_1_FAILS})
    with pytest.raises(SystemExit, match="rank 1 ended with exit status 3, expected 0"):
        logger.measure_steps(Namespace(steps=3), "")


# As a benchmark that is stopped while its ranks compute.
STOPPED = f"""
import functools, subprocess, sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from measuring import running
sleep = functools.partial(subprocess.Popen, [sys.executable, "-c", "import time; time.sleep(600)"], text=True)
with running({{"rank 0": sleep, "rank 1": sleep}}) as ranks:
    print(*(one.pid for one in ranks.values()), flush=True)
    ranks["rank 0"].wait()
"""


def test_ranks_end_with_the_benchmark_that_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        started_pids = process.stdout.readline().split()
        assert len(started_pids) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    assert not any(Path("/proc", pid).exists() for pid in started_pids)


def test_processes_that_end_by_themselves_are_waited_for() -> None:
    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", "print(7)"], stdout=subprocess.PIPE, text=True)

    before = signal.getsignal(signal.SIGTERM)
    with measuring.running({"one": start, "other": start}) as processes:
        assert [one.communicate()[0] for one in processes.values()] == ["7\n", "7\n"]
    assert [one.returncode for one in processes.values()] == [0, 0]
    assert signal.getsignal(signal.SIGTERM) is before


# Notes the same text twice, waits, and prints what it knows of the run if nothing ends it before.
TIMED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells ignore in the background
sys.path.insert(0, sys.argv[1])
from measuring import timed_run
with timed_run(1) as timed:
    timed.note("noted")
    timed.note("noted")
    print("begun", flush=True)
    sys.stdin.read()
print(timed.notes, timed.wall_s > 0)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (None, 0)])
def test_a_run_keeps_each_note_once_and_ends_without_a_traceback(number: signal.Signals | None, code: int) -> None:
    command, pipe = [sys.executable, "-c", TIMED, str(ROOT / "benchmarks")], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["noted\n", "begun\n"]
        if number is not None:
            process.send_signal(number)
        rest, errors = process.communicate(timeout=30)
    assert (process.returncode, rest, errors) == (code, "" if code else "['noted'] True\n", "")


BEGIN, END = "<!-- begin -->", "<!-- end -->"


def test_what_is_between_two_marks_of_a_page_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter {END}\n")
    measuring.put_between(page, BEGIN, END, lambda old: f"{old}new\n")
    assert page.read_text() == f"before\n{BEGIN}\nold\nnew\n{END}\nafter {END}\n"
    assert [one.name for one in tmp_path.iterdir()] == ["page.md"]


@pytest.mark.parametrize("mark", [BEGIN, END])
def test_a_page_without_a_mark_is_left_as_it_is(mark: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{mark}\nold\nafter\n")
    before = page.read_text()
    with pytest.raises(SystemExit, match=r"got no lines .* expected both"):
        measuring.put_between(page, BEGIN, END, str.upper)
    assert page.read_text() == before
