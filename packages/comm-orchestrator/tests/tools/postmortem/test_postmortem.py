"""``commctl postmortem`` on the rings of real processes."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from comm_orchestrator.tools import rings
from comm_orchestrator.tools.commands import app
from comm_orchestrator.tools.postmortem import evidence
from comm_utils.flight_recorder import default_directory, rings_in
from comm_utils.flight_recorder.directory import prune
from comm_utils.testing.recording import Plan, call, writers

Postmortem: TypeAlias = Callable[..., tuple[int, str]]

STEP = [call("done", "broadcast", 8, root=0), call("done", "all_reduce", 1000, op="sum")]
HANGS = call("open", "all_reduce", 1000, op="sum", caller="train_step")
# Ranks that wait for less are no reason to worry.
LONG_S = 1.2
# What a rank does that gives a sign after so long.
LATE = [["wait", LONG_S], ["stack", "train.py:2 train_step"]]
HANGS_LONG = [HANGS, *LATE]


@pytest.fixture
def postmortem(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Postmortem:
    """Return the exit code and what is printed: on stdout, or, without that, on stderr."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["commctl", "postmortem", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            app()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out or captured.err

    return run


def verdict(text: str) -> str:
    return text.splitlines()[0]


def test_a_running_job_in_which_nothing_is_wrong(postmortem: Postmortem, tmp_path: Path) -> None:
    for attempt in range(5):  # as rank 0 may be late for longer on a busy machine
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with writers(folder, {0: STEP, 1: [*STEP, HANGS]}):  # rank 0 has been late for milliseconds
            code, shown = postmortem(folder)
        if code == 0:
            break
    assert (code, verdict(shown)) == (0, "verdict: nothing wrong")
    assert "rank 1: alive, pid " in shown


def test_stacks_of_other_threads_follow_that_of_the_thread_that_makes_calls(
    postmortem: Postmortem, tmp_path: Path
) -> None:
    loads, trains = "train.py:3 run\ndata.py:9 load, in thread 'loader'", "train.py:2 train"
    with writers(tmp_path, {0: [*STEP, HANGS], 1: [*STEP, ["stack", f"{loads}\n\n{trains}"]]}):
        shown = postmortem(tmp_path)[1]
        (_, locked) = json.loads(postmortem(tmp_path, "--json")[1])["ranks"]
    headings = [line.partition(",")[0] for line in shown.splitlines() if line.startswith("  stack")]
    assert headings == ["  stack", "  stack of another thread"]
    assert shown.splitlines()[-2:] == ["    train.py:3 run", "    data.py:9 load, in thread 'loader'"]
    assert (locked["stack"], locked["stacks_of_other_threads"]) == (trains, [loads])


def test_a_rank_that_does_not_call(postmortem: Postmortem, tmp_path: Path) -> None:
    idle: Plan = [*STEP, ["stack", 'File "load.py", line 7, in load\n    read()']]
    with writers(tmp_path, {0: [*STEP, HANGS], 1: idle, 2: [*STEP, HANGS]}) as ranks:
        time.sleep(LONG_S)
        code, shown = postmortem(tmp_path)
    assert code == 1
    assert verdict(shown).startswith(f"verdict: missing: rank 1 (pid {ranks[1].pid} on ")
    assert "has not called all_reduce, for which ranks 0 and 2 wait" in verdict(shown)
    assert "all_reduce(1000 elements of float32, op sum) under way for " in shown
    assert "train.py:2 train_step" in shown
    assert 'File "load.py", line 7, in load' in shown


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_the_clock_was_set_after_the_start(
    postmortem: Postmortem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    with writers(tmp_path, {0: [*STEP, HANGS], 1: STEP}):
        time.sleep(LONG_S)
        set_ns = time.time_ns() + ahead_s * 10**9
        monkeypatch.setattr(evidence.time, "time_ns", lambda: set_ns)
        as_json = json.loads(postmortem(tmp_path, "--json")[1])
    assert as_json["verdict"]["kind"] == "missing"
    assert LONG_S <= as_json["ranks"][0]["groups"][0]["age_s"] < 600
    assert as_json["time_s"] == set_ns / 1e9


def test_a_rank_that_calls_another_operation(postmortem: Postmortem, tmp_path: Path) -> None:
    other = call("open", "all_gather", 1000, caller="evaluate")
    with writers(tmp_path, {0: [*STEP, HANGS], 1: [*STEP, other], 2: [*STEP, HANGS]}):
        code, shown = postmortem(tmp_path)
    assert code == 1
    assert verdict(shown).startswith("verdict: first divergence: the ranks' calls differ in the operation: in call 3 ")
    assert "rank 1 calls all_gather(1000 elements of float32) (train.py:2 evaluate)" in verdict(shown)


def test_a_killed_rank(postmortem: Postmortem, tmp_path: Path) -> None:
    raised = ["failure", "world", "rank 1 has ended", 1]
    late = call("failed", "all_reduce", 1000, op="sum")
    with writers(tmp_path, {1: [*STEP, HANGS]}, world_size=3) as first:
        first[0].kill()
        with writers(tmp_path, {0: [*STEP, late, raised], 2: [*STEP, late, raised]}, world_size=3) as others:
            for one in others:
                one.leave()
        code, shown = postmortem(tmp_path)
        as_json = json.loads(postmortem(tmp_path, "--json", "--calls", "2")[1])
    assert code == 1
    assert verdict(shown).startswith(f"verdict: dead: rank 1 (pid {first[0].pid} on ")
    assert "in the course of all_reduce" in verdict(shown)
    assert "has ended; times are before its last sign" in shown
    assert as_json["verdict"]["kind"] == "dead"
    assert as_json["verdict"]["ranks"] == [1]
    assert [one["state"] for one in as_json["ranks"]] == ["ended after a failure", "dead", "ended after a failure"]
    assert as_json["ranks"][1]["groups"][0]["state"] == "under way"
    assert [one["call"] for one in as_json["ranks"][0]["calls"]] == ["all_reduce", "all_reduce"]
    assert as_json["ranks"][2]["failures"][0]["text"] == "rank 1 has ended"
    assert as_json["ranks"][2]["failures"][0]["ranks"] == [1]


def test_a_stopped_rank(postmortem: Postmortem, tmp_path: Path) -> None:
    with writers(tmp_path, {0: [*STEP, HANGS], 1: STEP}) as ranks:
        ranks[1].stop()
        code, shown = postmortem(tmp_path)
    assert (code, verdict(shown).partition(" (")[0]) == (1, "verdict: stopped: rank 1")
    assert "rank 1: stopped" in shown


def test_a_rank_that_a_debugger_holds(postmortem: Postmortem, tmp_path: Path) -> None:
    ptrace, attach, detach = ctypes.CDLL(None).ptrace, 16, 17  # of <sys/ptrace.h>
    with writers(tmp_path, {0: [*STEP, HANGS], 1: STEP}) as ranks:
        if ptrace(attach, ranks[1].pid, None, None):
            pytest.skip("this machine does not let this process debug another one")
        os.waitid(os.P_PID, ranks[1].pid, os.WSTOPPED | os.WNOWAIT)
        _, shown = postmortem(tmp_path)
        ptrace(detach, ranks[1].pid, None, None)
    own = f"{Path('/proc/self/comm').read_text().strip()}, pid {os.getpid()}"
    assert f"is held by a debugger ({own})" in verdict(shown)


def test_a_rank_of_another_container_lives_while_its_ring_is_locked(
    postmortem: Postmortem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rings, "own_identity", lambda: "another container")
    monkeypatch.setattr(evidence, "_SILENT_NS", 0)
    with writers(tmp_path, {0: STEP, 1: STEP}) as ranks:
        ranks[0].kill()
        shown = postmortem(tmp_path)[1]
    assert f"rank 0: dead, pid {ranks[0].pid} on " in shown
    assert f"rank 1: alive, pid {ranks[1].pid} on " in shown


def test_ranks_that_were_all_killed(postmortem: Postmortem, tmp_path: Path) -> None:
    with writers(tmp_path, {0: [*STEP, *HANGS_LONG], 1: [*STEP, *LATE], 2: [*STEP, *HANGS_LONG]}) as ranks:
        for one in ranks:
            one.kill()
        code, shown = postmortem(tmp_path)
    assert code == 1
    assert verdict(shown).startswith("verdict: missing: rank 1 ")
    assert "also killed: all 3 ranks have ended without a clean end or an error" in shown


def test_of_killed_ranks_the_first_that_gave_no_sign_is_the_cause(postmortem: Postmortem, tmp_path: Path) -> None:
    with writers(tmp_path, {1: [*STEP, HANGS]}, world_size=2) as first:
        first[0].kill()
        time.sleep(LONG_S)
        with writers(tmp_path, {0: [*STEP, HANGS]}, world_size=2) as second:
            second[0].kill()
            shown = postmortem(tmp_path)[1]
    assert verdict(shown).startswith(f"verdict: missing: rank 1 (pid {first[0].pid} ")
    assert " before all were killed: hung, stopped or dead; at its last sign, it is in all_reduce(1000 " in verdict(
        shown
    )
    assert "also killed: all 2 ranks have ended without a clean end or an error" in shown


def test_a_rank_that_hung_before_all_were_killed_is_missing_and_did_not_die_first(
    postmortem: Postmortem, tmp_path: Path
) -> None:
    with writers(tmp_path, {0: [*STEP, *HANGS_LONG], 1: STEP, 2: [*STEP, *HANGS_LONG]}) as ranks:
        ranks[1].stop()
        for one in ranks:
            one.kill()
        shown = postmortem(tmp_path)[1]
    assert verdict(shown).startswith(f"verdict: missing: rank 1 (pid {ranks[1].pid} on ")
    assert (
        " before all were killed: hung, stopped or dead; at its last sign, it is in none of its calls; its last "
        in verdict(shown)
    )
    assert shown.count("missing: rank 1") == 1


def test_a_rank_that_was_killed_where_the_launcher_then_ends_the_others(postmortem: Postmortem, tmp_path: Path) -> None:
    ended = ["signal", signal.SIGTERM]
    plans = {0: [*STEP, HANGS, ended], 1: STEP, 2: [*STEP, HANGS, ended]}
    with writers(tmp_path, plans) as ranks:
        for one in ranks:
            one.kill()
        shown = postmortem(tmp_path)[1]
    assert verdict(shown).startswith(f"verdict: dead: rank 1 (pid {ranks[1].pid} on ")
    assert "dead: rank 0" not in shown
    assert "dead: rank 2" not in shown


def test_ranks_that_were_all_asked_to_end(postmortem: Postmortem, tmp_path: Path) -> None:
    ended = ["signal", signal.SIGTERM]
    with writers(tmp_path, {0: [*STEP, *HANGS_LONG, ended], 1: [*STEP, ended]}) as ranks:
        for one in ranks:
            one.kill()
        shown = postmortem(tmp_path)[1]
    assert verdict(shown).startswith("verdict: missing: rank 1 ")
    assert "for which rank 0 waits: it was sent SIGTERM; until then, it is in none of its calls" in shown
    assert "also killed: ranks 0, 1 were ended from outside: the first has ended by SIGTERM" in shown


def test_a_rank_alone_that_was_asked_to_end(postmortem: Postmortem, tmp_path: Path) -> None:
    with writers(tmp_path, {0: [*STEP, HANGS, ["signal", signal.SIGTERM]]}) as ranks:
        ranks[0].kill()
        shown = postmortem(tmp_path)[1]
    assert verdict(shown) == "verdict: killed: rank 0 was ended from outside: it has ended by SIGTERM"


@pytest.mark.parametrize("other", [STEP, [*STEP, HANGS]], ids=["missing", "slow"])
def test_what_had_just_begun_when_all_were_killed_is_no_cause(
    postmortem: Postmortem, tmp_path: Path, other: Plan
) -> None:
    ended = ["signal", signal.SIGTERM]
    with writers(tmp_path, {0: [*STEP, HANGS, ended], 1: [*other, ended]}) as ranks:
        for one in ranks:
            one.kill()
        shown = postmortem(tmp_path)[1]
    assert verdict(shown).startswith("verdict: killed: ranks 0, 1 were ended from outside")
    assert "missing" not in shown
    assert "slow" not in shown


def test_a_program_that_fails_and_a_launcher_that_kills_the_others(postmortem: Postmortem, tmp_path: Path) -> None:
    failed = ["failure", "", "no such file"]
    with writers(tmp_path, {1: [*STEP, failed]}, world_size=3) as first:
        first[0].leave()
        with writers(tmp_path, {0: [*STEP, HANGS], 2: STEP}, world_size=3) as others:
            for one in others:
                one.kill()
            code, shown = postmortem(tmp_path)
    assert code == 1
    assert verdict(shown).startswith("verdict: dead: rank 1 ")
    waited = "for which rank 0 waits: it has ended with ValueError: no such file; its last call was all_reduce(1000 "
    assert waited in verdict(shown)
    assert "dead: rank 0" not in shown
    assert "rank 0: dead" in shown


def test_an_error_that_nothing_explains(postmortem: Postmortem, tmp_path: Path) -> None:
    with writers(tmp_path, {0: [*STEP, ["failure", "world", "no route\nto \x1b[31mhost"]], 1: STEP}):
        code, shown = postmortem(tmp_path)
    assert (code, verdict(shown)) == (1, "verdict: failure: rank 0 raised CommTimeoutError: no route to \\x1b[31mhost")


def test_a_call_that_takes_long_on_all_ranks(postmortem: Postmortem, tmp_path: Path) -> None:
    with writers(tmp_path, {0: [*STEP, *HANGS_LONG], 1: [*STEP, *HANGS_LONG]}) as ranks:
        for one in ranks:
            one.kill()
        shown = postmortem(tmp_path)[1]
    assert verdict(shown).startswith("verdict: slow: all_reduce(1000 elements")
    assert "on ranks 0, 1" in verdict(shown)


def test_damaged_and_missing_rings_are_named(postmortem: Postmortem, tmp_path: Path) -> None:
    with writers(tmp_path, {0: STEP, 1: STEP, 2: STEP, 3: STEP}) as ranks:
        damaged, missing = rings_in(tmp_path)[1:3]
        damaged.write_bytes(b"no ring" + bytes(8192))
        missing.unlink()
        (tmp_path / "job" / "rank-9.ring").write_bytes(b"")
        code, shown = postmortem(tmp_path)
        for one in ranks:
            one.kill()
    assert code == 1
    assert f"damaged: {damaged}: not a ring" in shown
    assert "rank-9.ring: 0 bytes" in shown
    assert "no ring: ranks 1, 2 (damaged, of another host, or removed at a clean end)" in shown
    assert "rank 3: alive" in shown


def test_the_newest_of_several_jobs(postmortem: Postmortem, tmp_path: Path) -> None:
    with writers(tmp_path, {0: STEP}, job="first"), writers(tmp_path, {0: STEP}, job="second"):
        shown = postmortem(tmp_path)[1]
        of_first = postmortem(tmp_path / "first")[1]
    assert "job second of 1 rank" in shown
    assert "other jobs in" in shown
    assert "job first of 1 rank" in of_first
    assert "other jobs" not in of_first


def test_a_job_by_its_name(postmortem: Postmortem, tmp_path: Path) -> None:
    name = f"test-{tmp_path.name}"
    with writers(default_directory(), {0: STEP}, job=name) as ranks:
        shown = postmortem(name)[1]
        ranks[0].leave()
    assert f"job {name} of 1 rank" in shown
    assert not (default_directory() / name).exists()


def test_no_folder_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(variable, raising=False)
    read_only = "mount --bind $place $place && mount -o remount,bind,ro $place"
    script = f'for place in /dev/shm /tmp /var/tmp; do {read_only} || exit; done; cd /proc; exec "$@"'
    apart = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
    if not shutil.which("unshare") or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a mount namespace of its own")
    command = [sys.executable, "-m", "comm_orchestrator", "postmortem"]
    found = subprocess.run([*apart, *command], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 2
    # Under coverage, its own failure to write follows.
    assert found.stderr.startswith("error: No usable temporary directory")
    assert "give the folder that has the rings" in found.stderr


def test_the_directory_of_the_configuration(
    postmortem: Postmortem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMM_FLIGHT_RECORDER__DIRECTORY", str(tmp_path))
    with writers(tmp_path, {0: STEP}, job="mine"):
        assert "job mine of 1 rank" in postmortem()[1]
        assert "job mine of 1 rank" in postmortem("mine")[1]


def test_without_rings(postmortem: Postmortem, tmp_path: Path) -> None:
    code, shown = postmortem(tmp_path)
    assert code == 2
    assert f"error: {tmp_path}: no rings; expected files such as JOB/rank-0.ring" in shown
    code, shown = postmortem("no-such-job")
    assert code == 2
    assert "got 'no-such-job'; expected a folder with rings" in shown


def test_dumps_for_torch(postmortem: Postmortem, tmp_path: Path) -> None:
    rings, dumps = tmp_path / "rings", tmp_path / "dumps"
    with writers(rings, {0: [*STEP, HANGS], 1: STEP}):
        shown = postmortem(rings, "--torch-dump", dumps)[1]
        again = postmortem(rings, "--torch-dump", dumps)
    without_rings = postmortem(tmp_path / "dumps", "--torch-dump", dumps)
    assert sorted(path.name for path in dumps.iterdir()) == ["rank_0", "rank_1"]
    assert f"python -m torch.distributed.flight_recorder.fr_trace {dumps}" in shown
    assert again[0] == 2
    assert "expected an empty one" in again[1]
    assert without_rings == again, "the folder is looked at before the rings"


def test_nobody_waits_for_the_writer_of_a_pipe(postmortem: Postmortem, tmp_path: Path) -> None:
    pipe = tmp_path / "job" / "rank-0.ring"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    expected = f"error: {tmp_path}: no ring can be read: {pipe}: not a regular file\n"
    assert postmortem(tmp_path) == (2, expected)
    prune(tmp_path, keep=0, identity="")
