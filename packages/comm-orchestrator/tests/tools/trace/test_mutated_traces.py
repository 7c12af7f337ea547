"""``commctl trace summary`` and ``merge`` read damaged traces or refuse them with one sentence that names the file."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
from mutations import mutated

from comm_orchestrator.tools.trace import loading, merging, summary_text
from comm_orchestrator.tools.trace.summary import summarize
from comm_utils.errors import ArgumentError
from comm_utils.observability.traces.traffic import traffic

CORPUS = Path(__file__).parents[4] / "comm-utils/tests/observability/corpus"
RECORDED = {path.name: path.read_bytes() for path in sorted((CORPUS / "recorded").iterdir())}
# Far more than any of these files needs, also on a loaded machine.
LIMIT_S = 10.0
SEEDS = 300


def use(folder: Path, output: Path) -> str:
    """What both commands do with ``folder``; the error's text, or nothing."""
    start = time.monotonic()
    try:
        traces = loading.read(folder)
        found = summarize(traces)
        json.dumps(found.to_json()).encode()
        summary_text.text(found, io.StringIO()).encode()
        traffic(traces)
        merging.merge(traces, output / "merged.json")
        json.loads((output / "merged.json").read_text(encoding="utf-8"))
    except ArgumentError as error:
        assert str(folder) in str(error)
        assert len(str(error)) < 1000
        str(error).encode()
        return str(error)
    finally:
        assert time.monotonic() - start < LIMIT_S
    return ""


def written(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_what_was_recorded_is_read(tmp_path: Path) -> None:
    assert use(CORPUS / "recorded", tmp_path) == ""


@pytest.mark.parametrize("folder", sorted((CORPUS / "failed").iterdir()), ids=lambda folder: folder.name)
def test_what_once_failed(folder: Path, tmp_path: Path) -> None:
    """Inputs that ended in a traceback, or took half a minute, before readers were bounded."""
    use(folder, tmp_path)


def test_traces_changed_at_random(tmp_path: Path) -> None:
    refused = 0
    for seed in range(SEEDS):
        try:
            refused += bool(use(written(mutated(RECORDED, seed), tmp_path / "trace"), tmp_path))
        except BaseException as error:
            error.add_note(f"seed {seed}") if hasattr(error, "add_note") else None
            raise
    # Some changes leave a trace that can be read; a test in which all were refused would see little.
    assert SEEDS // 3 < refused < SEEDS


def test_a_claim_of_many_ranks_costs_nothing(tmp_path: Path) -> None:
    line = {"format": "comm-trace", "version": 1, "rank": 0, "world_size": 10**10}
    (tmp_path / "rank0.jsonl").write_text(json.dumps(line) + "\n")
    message = use(tmp_path, tmp_path)
    assert f"got 1 of {10**10} ranks' files; missing: rank1.jsonl, rank2.jsonl" in message
