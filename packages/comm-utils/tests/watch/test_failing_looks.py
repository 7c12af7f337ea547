"""The watch's threads report that they cannot look, once, and go on."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from comm_utils.flight_recorder import RECORDER, FlightRecorderSettings
from comm_utils.watch import Watch, remote_observer
from comm_utils.watch.local_ranks import LocalRanks
from comm_utils.watch.remote_ranks import RemoteRanks


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """A watch of a world of two, of which this process is one; to be started."""
    monkeypatch.setattr(logging.getLogger("comm"), "propagate", True)
    monkeypatch.setattr(remote_observer, "_FIRST_POLL_S", 0.05)
    monkeypatch.setattr(remote_observer, "_POLL_S", 0.05)
    monkeypatch.setattr(RECORDER, "settings", FlightRecorderSettings(directory=str(tmp_path)))
    RECORDER.open(0, 2, "job")
    made = Watch()
    yield made
    made.stop()
    RECORDER.close()


@pytest.mark.parametrize(
    ("of", "name", "text"),
    [
        (LocalRanks, "refresh", "the watch of rank 0 could not look: KeyError: 'x'"),
        (RemoteRanks, "answer", "the watch of rank 0 could not look at other hosts: KeyError: 'x'"),
    ],
)
def test_a_look_that_fails_is_reported_once(
    of: type, name: str, text: str, watch: Watch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[object] = []

    def fail(*arguments: object, **named: object) -> None:
        looks.append(arguments)
        raise KeyError("x")

    monkeypatch.setattr(of, name, fail)
    watch.start(0, 2)
    end = time.monotonic() + 20
    while len(looks) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(looks) >= 3
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert record.getMessage().startswith(text)
