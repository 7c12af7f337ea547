"""Which rings a rank takes for those of the other ranks of its world."""

from __future__ import annotations

import logging
import os
import platform
import re
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from comm_utils.flight_recorder import FlightRecorder, FlightRecorderSettings
from comm_utils.testing.recording import call, writers
from comm_utils.watch.local_ranks import LocalRanks


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[FlightRecorder]:
    """The recorder of rank 1 of 2, without a world."""
    made = FlightRecorder()
    made.settings = FlightRecorderSettings(directory=str(tmp_path))
    yield made
    made.close()


def test_a_ring_that_a_failed_world_has_left_is_not_that_of_the_next(recorder: FlightRecorder, tmp_path: Path) -> None:
    recorder.open(1, 2, "job")
    recorder.failure("world", "PeerLostError", "rank 0 has ended")
    recorder.close()
    ranks = LocalRanks(tmp_path / "job", None, 2, time.perf_counter_ns())
    ranks.refresh(now=True)
    assert ranks.readers == {}
    recorder.open(1, 2, "job")
    ranks.refresh()
    assert ranks.state_of(1) == "running"
    ranks.close()


def test_a_rank_that_has_ended_its_world_has_left(recorder: FlightRecorder, tmp_path: Path) -> None:
    recorder.open(1, 2, "job")
    ranks = LocalRanks(tmp_path / "job", None, 2)
    ranks.refresh()
    assert ranks.state_of(1) == "running"
    recorder.close()
    assert list(tmp_path.rglob("*.ring")) == []
    assert ranks.state_of(1) == "left"
    ranks.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_ring_of_another_user_is_left_out(
    recorder: FlightRecorder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.open(1, 2, "job")
    assert recorder.path is not None
    os.chown(recorder.path, 12345, -1)
    ranks = LocalRanks(tmp_path / "job", None, 2)
    with caplog.at_level(logging.WARNING, "comm"):
        for _ in range(2):
            ranks.refresh(now=True)
    assert ranks.readers == {}
    (warning,) = caplog.messages
    assert f"belongs to uid 12345, not to uid {os.geteuid()}: '{recorder.path}'" in warning
    assert "set flight_recorder.directory" in warning
    ranks.close()


@contextmanager
def descriptors(left: int) -> Iterator[None]:
    """Leave this process so many descriptors."""
    before, used = resource.getrlimit(resource.RLIMIT_NOFILE), set(map(int, os.listdir("/proc/self/fd")))
    limit = len(used) - 1 + left
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_rank_takes_two_descriptors_and_the_program_keeps_the_last_ones(
    recorder: FlightRecorder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.open(1, 2, "job")
    ranks = LocalRanks(tmp_path / "job", None, 2)
    with caplog.at_level(logging.WARNING, "comm"), descriptors(16):
        for _ in range(3):
            ranks.refresh(now=True)
        assert ranks.readers == {}
    (warning,) = caplog.messages
    assert "can open 16 more files" in warning
    assert "ulimit -n 4096" in warning
    opened = len(os.listdir("/proc/self/fd"))
    with descriptors(17):
        ranks.refresh(now=True)
        assert ranks.state_of(1) == "running"
    assert len(os.listdir("/proc/self/fd")) == opened + 1  # of its ring, and none was left for its process
    ranks.close()
    with descriptors(18):
        ranks = LocalRanks(tmp_path / "job", None, 2)
        ranks.refresh(now=True)
    assert len(os.listdir("/proc/self/fd")) == opened + 2
    ranks.close()
    with writers(tmp_path, {2: [call("open", "all_reduce")]}, world_size=3), descriptors(18):
        ranks = LocalRanks(tmp_path / "job", None, 3)
        ranks.refresh(now=True)
        assert sorted(ranks.readers) == [1, 2], "rings come before processes"
        ranks.close()
    assert len(os.listdir("/proc/self/fd")) == opened


_TELLS_ENDS = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (6, 15)


@pytest.mark.skipif(not _TELLS_ENDS, reason="needs Linux 6.15")
def test_the_signal_that_has_ended_a_rank_shows_after_its_parent_has_waited(tmp_path: Path) -> None:
    with writers(tmp_path, {1: [call("open", "all_reduce")]}, world_size=2) as (writer,):
        ranks = LocalRanks(tmp_path / "job", None, 2)
        ranks.refresh(now=True)
        writer.kill()
    assert ranks.snapshots()[1].end == "has ended by SIGKILL"
    ranks.close()


def test_a_rank_waits_for_the_others_to_look(recorder: FlightRecorder, tmp_path: Path) -> None:
    recorder.open(1, 2, "job")
    ranks = LocalRanks(tmp_path / "job", None, 2)
    ranks.refresh()
    begin = time.perf_counter_ns()

    def look() -> None:
        time.sleep(0.1)
        recorder.memory.set_word("listed_at", time.perf_counter_ns())

    thread = threading.Thread(target=look)
    thread.start()
    ranks.await_listing(begin, 20)
    thread.join()
    assert 0.1 <= (time.perf_counter_ns() - begin) / 1e9 < 10
    begin = time.perf_counter_ns()
    ranks.await_listing(begin, 0.2)
    assert 0.2 <= (time.perf_counter_ns() - begin) / 1e9 < 10
    ranks.close()


def test_the_rings_that_a_thread_goes_through_stay_while_another_finds_new_ones(
    recorder: FlightRecorder, tmp_path: Path
) -> None:
    ranks = LocalRanks(tmp_path / "job", None, 3)
    recorder.open(1, 3, "job")
    ranks.refresh()
    other = FlightRecorder()
    other.settings = recorder.settings
    other.open(2, 3, "job")
    seen = []
    for rank in ranks.readers:
        ranks.refresh(now=True)
        seen.append(rank)
    other.close()
    assert (seen, sorted(ranks.readers)) == ([1], [1, 2])
    ranks.close()
