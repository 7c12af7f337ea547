"""Nothing outlives a run: processes, descriptors, files."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from comm_utils.testing import RankFailure, RankPool, run_ranks, run_ranks_outcomes

# Loaded by path, as test folders are no packages.
_spec = importlib.util.spec_from_file_location(f"{__name__}_targets", Path(__file__).with_name("testing_targets.py"))
assert _spec is not None
assert _spec.loader is not None
targets = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(targets)


ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def pids_in(folder: Path, count: int) -> list[int]:
    give_up = time.monotonic() + 30
    while len(found := list(folder.glob("*.pid"))) < count:
        assert time.monotonic() < give_up, "the ranks did not start"
        time.sleep(0.02)
    return [int(path.read_text()) for path in found]


def assert_gone(pids: list[int], within_s: float = 10.0) -> None:
    give_up = time.monotonic() + within_s
    while alive := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < give_up, f"still running: {alive}"
        time.sleep(0.02)


def descriptors() -> dict[str, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[entry.name] = os.readlink(entry)
    return found


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_no_descriptor_child_or_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_ranks(targets.my_rank, 2)  # what ranks are forked from stays until the runner ends
    before, children_before = descriptors(), children()
    run_ranks(targets.my_rank, 2)
    run_ranks_outcomes(targets.start_children, 1, tmp_path, "raise")
    with RankPool(2) as pool:
        pool.run(targets.my_rank)
        with pytest.raises(RankFailure):
            pool.run(targets.announce_and_sleep, tmp_path, timeout_s=0.3)
        pool.run(targets.my_rank)
    assert descriptors() == before
    assert children() == children_before
    assert {path.suffix for path in tmp_path.iterdir()} <= {".pid"}


@pytest.mark.parametrize("outcome", ["return", "raise", "die"])
def test_children_of_ranks_are_killed(tmp_path: Path, outcome: str) -> None:
    run_ranks_outcomes(targets.start_children, 1, tmp_path, outcome)
    assert_gone(pids_in(tmp_path, 2), within_s=1)


def test_ranks_of_ranks_are_killed(tmp_path: Path) -> None:
    (outcome,) = run_ranks_outcomes(targets.nested, 1, tmp_path)
    assert outcome.status == "died"
    assert_gone(pids_in(tmp_path, 2), within_s=1)


@pytest.mark.parametrize(
    ("how", "signal_number"),
    [
        ("run_ranks", signal.SIGINT),
        ("RankPool", signal.SIGINT),
        ("run_ranks", signal.SIGKILL),
        ("RankPool", signal.SIGTERM),
        ("thread", signal.SIGKILL),
    ],
)
def test_ranks_end_with_the_runner(tmp_path: Path, how: str, signal_number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, targets.__file__, how, str(tmp_path)], env=ENV, stderr=subprocess.PIPE, start_new_session=True
    )
    pids = pids_in(tmp_path, 2)
    process.send_signal(signal_number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal_number
    assert_gone(pids, within_s=0.0 if signal_number == signal.SIGINT else 10.0)
    assert (b"KeyboardInterrupt" in errors) == (signal_number == signal.SIGINT)


def test_a_run_in_a_thread_that_ends_while_the_pool_lives_on() -> None:
    with RankPool(2) as pool:
        thread = threading.Thread(target=pool.run, args=(targets.my_rank,))
        thread.start()
        thread.join()
        assert pool.run(targets.my_rank) == [0, 1]
