"""The command line of ``commctl trace``: what it writes, and what a wrong call gets."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from comm_orchestrator.tools.commands import app
from comm_orchestrator.tools.trace.comparison import tally
from comm_orchestrator.tools.trace.files import waiting_of
from comm_utils.observability.traces import Event, Operation, RankTrace
from comm_utils.observability.traces.file import save
from comm_utils.observability.traces.waiting import account


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    operation = Operation("all_reduce", "all_reduce", 4096, (0, 1), "0", "float32", "sum")
    for rank, late in ((0, 0), (1, 30)):
        event = Event(operation, 0, late * 1000, 50_000, 50_000)
        save(tmp_path / "trace", RankTrace(rank, 2, "host", rank, "gloo", events=[event]))
    return tmp_path


def test_merge_writes_one_trace_with_waiting_times(folder: Path) -> None:
    for name in ("merged.json", "merged.json.gz"):
        done = CliRunner().invoke(app, ["trace", "merge", str(folder / "trace"), "-o", str(folder / name)])
        assert (done.exit_code, done.output) == (0, "")
    text = (folder / "merged.json").read_text()
    assert gzip.decompress((folder / "merged.json.gz").read_bytes()).decode() == text
    slices = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
    assert [(event["args"]["waiting_us"], event["args"]["transfer_us"]) for event in slices] == [(30, 20), (0, 20)]
    assert slices[0]["args"]["waited_for_rank"] == 1
    assert sorted(path.name for path in folder.iterdir()) == ["merged.json", "merged.json.gz", "trace"]


def test_all_commands_allow_alike_for_the_clocks_of_hosts() -> None:
    """Rank 1's clock seems 60 us ahead, which its uncertainty allows; rank 0's calls end before rank 1's begin."""
    operation = Operation("all_reduce", "all_reduce", 4096, (0, 1), "0", "float32", "sum")
    traces = []
    for rank, ahead_ns in ((0, 0), (1, 60_000)):
        begins = [1_000_000 * number + ahead_ns for number in range(10)]
        events = [Event(operation, number, ns, ns + 50_000, ns + 50_000) for number, ns in enumerate(begins)]
        traces.append(RankTrace(rank, 2, f"host{rank}", rank, uncertainty_ns=100_000 * rank, events=events))
    shares = [share for found in account(traces).shares.values() for share in found.values()]
    assert sum(share.waiting_ns for share in shares) == 10 * 50_000
    assert sum(waiting_ns for waiting_ns, _ in waiting_of(traces).values()) == 10 * 50_000
    assert [(one.accounted_ns, one.waiting_ns) for one in tally(traces).values()] == [(20 * 50_000, 10 * 50_000)]


def test_summary_is_text_or_one_document(folder: Path) -> None:
    shown = CliRunner().invoke(app, ["trace", "summary", str(folder / "trace")])
    assert shown.exit_code == 0
    assert "all_reduce" in shown.output
    assert "rank 1" in shown.output
    found = json.loads(CliRunner().invoke(app, ["trace", "summary", str(folder / "trace"), "--json"]).output)
    assert found["stragglers"][0]["rank"] == 1
    assert found["operations"][0]["waiting_s"] == pytest.approx(30e-6)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["summary", "nothing"], "nothing: there is no such folder; expected a folder with rank0.jsonl"),
        (["merge", "trace", "-o", "no/m.json"], "no/m.json: there is no folder 'no'; create it"),
        (["merge", "trace", "-o", "."], "got a folder, expected the path of a file"),
        (["merge", "trace", "-o", "trace/rank0.jsonl"], "--output: trace/rank0.jsonl is a file of the trace"),
        (["merge", "trace", "-o", "link"], "--output: link is a file of the trace that is read; expected another name"),
        (["merge", "linked", "-o", "real"], "--output: real is a file of the trace"),
        (["merge", "trace", "-o", "trace/rank7.jsonl"], "--output: trace/rank7.jsonl is a file of the trace"),
        (["plot", "pictures", "-o", "it.svg"], "--output: it.svg is a file of the trace"),
        (["replay", "trace", "--json", "trace/../trace/rank1.jsonl"], "rank1.jsonl is a file of the trace"),
        (["summary", "fifo"], "fifo: the trace cannot be read: [Errno 22] not a regular file: 'fifo/rank0.jsonl'"),
        (["summary", "endless"], "not a regular file: 'endless/rank0.jsonl'"),
        (["merge", "half", "-o", "m.json"], "got 1 of 2 ranks' files; missing: rank1.jsonl"),
        (["plot", "trace", "-o", "it.gif"], "expected .svg or .png"),
        (["plot", "trace", "-o", "it.svg", "--kind", "bars"], "expected one of timeline, traffic, both"),
        (["plot", "trace", "-o", "it.svg", "--ranks", "0,x"], "expected ranks such as 0,2,4-6"),
        (["plot", "trace", "-o", "it.svg", "--ranks", "9"], "the trace has the ranks 0 to 1"),
        (["plot", "trace", "-o", "it.svg", "--from", "1"], "the trace lasts 5e-05 s"),
        (["plot", "trace", "-o", "it.svg", "--to", "1e300"], "--to: got 1e+300; expected seconds since the first call"),
        (["plot", "empty", "-o", "it.svg"], "no operations"),
        (["replay", "nothing"], "there is no such folder"),
        (["replay", "empty"], "no operations"),
        (["replay", "trace", "--backend", "smoke"], "--backend: got 'smoke'; expected one of"),
        (
            ["replay", "elsewhere"],
            "error: the trace was recorded on 'smoke': backend 'smoke' is not installed (usable here",
        ),
        (["replay", "elsewhere"], "; or replay it on another library, such as --backend gloo"),
        (["replay", "trace", "-o", "trace"], "is the trace that is replayed"),
        (["replay", "trace", "--json", "no/x.json"], "--json: no/x.json: cannot be written"),
        (["replay", "trace", "--timeout", "0.01"], "--timeout: got 0.01"),
    ],
)
def test_a_wrong_call_gets_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(folder)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    save("empty", RankTrace(0, 1))
    save("half", RankTrace(0, 2))
    alone = Event(Operation("barrier", "barrier", 0, (0,), "0"), 0, 0, 1, 1)
    save("elsewhere", RankTrace(0, 1, backend="smoke", events=[alone]))
    (folder / "link").symlink_to("trace/rank1.jsonl")
    for name, target in (("linked", "real"), ("pictures", "it.svg")):
        save(name, RankTrace(0, 1)).rename(target)
        Path(name, "rank0.jsonl").symlink_to(folder / target)
    for name in ("fifo", "endless"):
        (folder / name).mkdir()
    os.mkfifo("fifo/rank0.jsonl")
    (folder / "endless" / "rank0.jsonl").symlink_to("/dev/zero")
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    done = CliRunner().invoke(app, ["trace", *arguments])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert expected in done.stderr
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before


@pytest.mark.parametrize(("command", "place"), [("merge", "/dev/stdout"), ("merge", ">(cat)"), ("plot", "it.png")])
def test_output_may_be_a_pipe(folder: Path, command: str, place: str) -> None:
    """A picture too, where the name of the pipe says which kind."""
    (folder / "it.png").symlink_to("/dev/stdout")
    line = f"{sys.executable} -m comm_orchestrator trace {command} trace -o {place} | cat"
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, b"")
    if command == "merge":
        assert json.loads(done.stdout)["otherData"]["world_size"] == 2
    else:
        assert done.stdout.startswith(b"\x89PNG")
        assert done.stdout.endswith(b"IEND\xaeB`\x82")


def test_who_stops_reading_a_merged_trace_sees_no_error(folder: Path) -> None:
    command = f"{sys.executable} -m comm_orchestrator trace merge {folder / 'trace'} -o /dev/stdout | head -c 0"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_who_stops_reading_sees_no_error(folder: Path) -> None:
    command = f"{sys.executable} -m comm_orchestrator trace summary {folder / 'trace'} --json | head -c 5"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is always full")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_output_that_has_no_place(folder: Path, more: list[str]) -> None:
    command = [sys.executable, "-m", "comm_orchestrator", "trace", "summary", str(folder / "trace"), *more]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (2, "error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("columns", ["", "60"])
def test_a_terminal_without_some_characters(folder: Path, columns: str) -> None:
    command = [sys.executable, "-m", "comm_orchestrator", "trace", "summary", str(folder / "trace")]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "COLUMNS": columns}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("?") == 1, "the sign of the clocks' uncertainty"


def hostile(folder: Path) -> Path:
    """A trace whose texts are commands to terminals, and formulas that are none."""
    texts = [f"a{character}[31m$x_" for character in "\x1b\x9b\x00\x07\n\r\u202e\u2028"]
    operations = [Operation(text, "all_reduce", 4096, (0,), text, "float32", "sum", method=text) for text in texts]
    events = [Event(one, number, number, number + 1, number + 1) for number, one in enumerate(operations)]
    save(folder / "hostile", RankTrace(0, 1, texts[0], 1, texts[0], events=events))
    return folder / "hostile"


def is_harmless(text: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in text)


def test_names_give_no_commands_to_the_terminal(folder: Path) -> None:
    trace = str(hostile(folder))
    shown = CliRunner().invoke(app, ["trace", "summary", trace])
    assert shown.exit_code == 0
    assert is_harmless(shown.output)
    for escape in ("\\x1b", "\\x9b", "\\x00", "\\x07", "\\n", "\\u202e"):
        assert f"a{escape}[31m$x_" in shown.output
    wrong = CliRunner().invoke(app, ["trace", "replay", trace, "--backend", "\x1b[31m"])
    assert (wrong.exit_code, is_harmless(wrong.output)) == (2, True)


def test_a_picture_shows_any_name_without_warnings(folder: Path) -> None:
    command = [sys.executable, "-m", "comm_orchestrator", "trace", "plot", str(hostile(folder))]
    done = subprocess.run([*command, "-o", str(folder / "it.svg")], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    text = (folder / "it.svg").read_text()
    assert r"on a\x1b[31m$x_" in text
    assert is_harmless(text)


def test_an_error_shows_names_with_escapes(folder: Path) -> None:
    operation = Operation("\x1b[31mred", "all_reduce", 4096, (0,), "0", "float32", "sum")
    save(folder / "wrong", RankTrace(0, 1, events=[Event(operation, 0, 5, 1, 1)]))
    done = CliRunner().invoke(app, ["trace", "summary", str(folder / "wrong")])
    assert done.exit_code == 2
    assert "\\x1b[31mred ends before it begins" in done.stderr
    assert is_harmless(done.stderr)
