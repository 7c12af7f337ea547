"""Nothing outlives a run: processes, descriptors, files."""

from __future__ import annotations

import contextlib
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
from comm_utils.testing.environment import PortReservation

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def announce(folder: Path, name: str) -> None:
    unfinished = folder / f"{name}.tmp"
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(folder / f"{name}.pid")


def announce_and_sleep(folder: Path) -> None:
    announce(folder, os.environ["RANK"])
    time.sleep(60)


def start_children(folder: Path, outcome: str) -> None:
    """One child in the rank's session, one that left it."""
    code = "import sys, time; print('on', flush=True); time.sleep(60)"
    for name, leave in (("inside", False), ("outside", True)):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=leave)
        assert child.stdout is not None
        child.stdout.readline()
        (folder / f"{name}.pid").write_text(str(child.pid))
    if outcome == "raise":
        raise RuntimeError("with children")
    if outcome == "hang":
        time.sleep(60)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # no complaint about unfinished children


def nested(folder: Path) -> None:
    run_ranks(announce_and_sleep, 2, folder)


def rank() -> int:
    return int(os.environ["RANK"])


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
    before, children_before = descriptors(), children()
    run_ranks(rank, 2)
    run_ranks_outcomes(start_children, 1, tmp_path, "raise")
    with RankPool(2) as pool:
        pool.run(rank)
        with pytest.raises(RankFailure):
            pool.run(announce_and_sleep, tmp_path, timeout_s=0.3)
        pool.run(rank)
    assert descriptors() == before
    assert children() == children_before
    assert {path.suffix for path in tmp_path.iterdir()} <= {".pid"}


@pytest.mark.parametrize("outcome", ["return", "raise", "hang"])
def test_children_of_ranks_are_killed(tmp_path: Path, outcome: str) -> None:
    run_ranks_outcomes(start_children, 1, tmp_path, outcome, timeout_s=5)
    assert_gone(pids_in(tmp_path, 2), within_s=1)


def test_ranks_of_ranks_are_killed(tmp_path: Path) -> None:
    (outcome,) = run_ranks_outcomes(nested, 1, tmp_path, timeout_s=4)
    assert outcome.status == "killed"
    assert_gone(pids_in(tmp_path, 2), within_s=1)


@pytest.mark.parametrize("how", ["run_ranks", "RankPool", "thread"])
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_runner(tmp_path: Path, how: str, signal_number: signal.Signals) -> None:
    if how == "thread" and signal_number == signal.SIGINT:
        pytest.skip("an interrupt reaches the main thread only")
    process = subprocess.Popen(
        [sys.executable, __file__, how, str(tmp_path)], env=ENV, stderr=subprocess.PIPE, start_new_session=True
    )
    pids = pids_in(tmp_path, 2)
    process.send_signal(signal_number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal_number
    assert_gone(pids, within_s=0.0 if signal_number == signal.SIGINT else 10.0)
    assert (b"KeyboardInterrupt" in errors) == (signal_number == signal.SIGINT)


def test_a_run_in_a_thread_that_ends_while_the_pool_lives_on() -> None:
    with RankPool(2) as pool:
        thread = threading.Thread(target=pool.run, args=(rank,))
        thread.start()
        thread.join()
        assert pool.run(rank) == [0, 1]


def test_reserved_ports_differ_and_are_released() -> None:
    reservations = [PortReservation() for _ in range(20)]
    ports = {reservation.port for reservation in reservations}
    assert len(ports) == 20
    for reservation in reservations:
        reservation.close()


if __name__ == "__main__":
    kind, directory = sys.argv[1], Path(sys.argv[2])
    if kind == "RankPool":
        with RankPool(2) as the_pool:
            the_pool.run(announce_and_sleep, directory)
    elif kind == "thread":
        worker = threading.Thread(target=run_ranks, args=(announce_and_sleep, 2, directory))
        worker.start()
        worker.join()
    else:
        run_ranks(announce_and_sleep, 2, directory)
