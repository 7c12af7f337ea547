import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from comm_orchestrator.tools import local_ranks
from comm_orchestrator.tools.bench import command
from comm_orchestrator.tools.commands import app
from comm_utils.observability.traces import Event, Operation, RankTrace
from comm_utils.observability.traces.file import save


@pytest.fixture(autouse=True)
def starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(module: str, arguments: list[str], ranks: int) -> int:
        raise AssertionError(f"{ranks} ranks were started")

    monkeypatch.setattr(local_ranks, "run", started)


def with_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free_bytes))


@pytest.mark.parametrize("operation", ["all_reduce", "barrier"])
def test_bench_starts_no_more_ranks_than_fit(
    operation: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["commctl", "bench", operation, "-e", "8", "--ranks", "100000", "--backend", "gloo"]
    )
    with pytest.raises(SystemExit) as ended:
        app()
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    assert shown.startswith("error: 100000 ranks take at least 15.26 TiB of memory and ")
    assert len(shown.splitlines()) == 1


def test_replay_starts_no_more_ranks_than_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    operation = Operation("all_reduce", "all_reduce", 8, (0, 1, 2, 3), "gloo", "float32", "sum")
    for rank in range(4):
        save(tmp_path, RankTrace(rank, 4, backend="gloo", job="j", events=[Event(operation, 0, 1, 2, 2)]))
    with_free(monkeypatch, 500 << 20)
    monkeypatch.setattr(sys, "argv", ["commctl", "trace", "replay", str(tmp_path), "--backend", "gloo"])
    with pytest.raises(SystemExit) as ended:
        app()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "error: 4 ranks take at least 640 MiB of memory and 500 MiB are free on this host; start 3 at most, or use a "
        "launcher and more hosts\n"
    )


def test_ranks_of_a_launcher_are_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 1 << 20)
    options = command.Options(operations=["all_reduce"], maxbytes=8)
    command.check_memory(options, 100, launched=True)
    with pytest.raises(command.ArgumentError, match="start 0 at most"):
        command.check_memory(options, 2, launched=False)


def test_memory_that_is_not_known_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> None:
        raise OSError

    monkeypatch.setattr(psutil, "virtual_memory", unknown)
    assert local_ranks.memory_for_data_bytes(100000) is None
