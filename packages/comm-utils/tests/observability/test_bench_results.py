"""The file of ``commctl bench --json``."""

from __future__ import annotations

import dataclasses
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_utils import operations
from comm_utils.errors import ArgumentError
from comm_utils.observability.bench_results import FORMAT, VERSION, BenchFile, BenchResult, load, save

RESULT = BenchResult(
    operation="all_reduce",
    library="ours",
    backend="gloo",
    way="in_place",
    dtype="float32",
    op="sum",
    root=-1,
    world_size=2,
    nodes=1,
    groups=1,
    size_bytes=8,
    count=2,
    iterations=20,
    time_us=10.5,
    min_us=9.0,
    p50_us=10.5,
    p95_us=12.0,
    p99_us=12.0,
    max_us=12.0,
    rounds_us=(9.0, 10.5, 12.0),
    algbw_gb_per_s=0.1,
    busbw_gb_per_s=0.1,
    wrong=None,
)
FILE = BenchFile("2026-01-01T00:00:00+00:00", "commctl bench", {"ranks": 2}, {"iters": 20}, (RESULT,))

TIMES = st.floats(0, 1e12, allow_nan=False)
COUNTS = st.integers(0, 2**60)


@given(
    operation=st.sampled_from(operations.benchmarked()),
    text=st.text(),
    rounds=st.lists(TIMES, min_size=1, max_size=5),
    time_us=TIMES,
    count=COUNTS,
    root=st.integers(-1, 2**20),
    wrong=st.none() | COUNTS,
    codec=st.text(),
)
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory,
    operation: str,
    text: str,
    rounds: list[float],
    time_us: float,
    count: int,
    root: int,
    wrong: int | None,
    codec: str,
) -> None:
    result = dataclasses.replace(
        RESULT,
        operation=operation,
        backend=text,
        rounds_us=tuple(rounds),
        time_us=time_us,
        size_bytes=count,
        root=root,
        wrong=wrong,
        codec=codec,
        wire_bytes=count,
    )
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    file = dataclasses.replace(FILE, command=text, results=(result, RESULT))
    save(file, path)
    assert load(path) == file
    assert [one.name for one in path.parent.iterdir()] == ["bench.json"]


def test_the_document_has_its_format_and_version(tmp_path: Path) -> None:
    FILE.save(tmp_path / "bench.json")
    document = json.loads((tmp_path / "bench.json").read_text())
    assert (document["format"], document["version"]) == (FORMAT, VERSION) == ("comm-bench", 1)
    assert document["results"][0]["rounds_us"] == [9.0, 10.5, 12.0]


def test_numbers_that_json_lacks_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    FILE.save(path)
    before = path.read_text()
    with pytest.raises(ValueError, match="not JSON compliant"):
        dataclasses.replace(FILE, results=(dataclasses.replace(RESULT, time_us=float("nan")),)).save(path)
    assert path.read_text() == before
    assert [one.name for one in tmp_path.iterdir()] == ["bench.json"]


def changed(**values: Any) -> str:
    document = FILE.to_json()
    document["results"] = [{**dataclasses.asdict(RESULT), **values}]
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "format list"),
        ('{"format": "comm-trace"}', "format 'comm-trace'"),
        ('{"format": "comm-bench", "version": 2}', "version 2"),
        ('{"format": "comm-bench", "version": 1}', "nothing under 'results'"),
        (changed(time_us=None), "None as 'time_us' of result 0"),
        (changed(time_us=-1), "-1 as 'time_us'"),
        (changed(time_us=float("inf")), "inf as 'time_us'"),
        (changed(rounds_us=[]), r"\[\] as 'rounds_us'"),
        (changed(count=True), "True as 'count'"),
        (changed(time_us=10**400), "integer"),
        (changed(count=10**400), "integer"),
        (changed(root=-2), "-2 as 'root'"),
        (changed(operation="allreduce"), "'allreduce' as 'operation'"),
        (changed(library=3), "3 as 'library'"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=told) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "commctl bench --json FILE" in str(caught.value)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    document = FILE.to_json()
    del document["results"][0]["busbw_gb_per_s"]
    (tmp_path / "bench.json").write_text(json.dumps(document))
    with pytest.raises(ArgumentError, match="no 'busbw_gb_per_s' in result 0"):
        load(tmp_path / "bench.json")


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.json")


def test_a_link_and_a_device_stay_what_they_are(tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "pipe"
    real.write_text("old")
    link.symlink_to(real)
    found = BenchFile(made="", command="", system={}, options={}, results=())
    found.save(link)
    assert link.is_symlink()
    assert BenchFile.load(real) == found
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    found.save(pipe)
    assert pipe.is_fifo()
    assert b"comm-bench" in os.read(reader, 100)
    os.close(reader)


def test_files_from_before_compression_are_read(tmp_path: Path) -> None:
    save(FILE, path := tmp_path / "bench.json")
    document = json.loads(path.read_text())
    for one in document["results"]:
        del one["codec"], one["wire_bytes"]
    path.write_text(json.dumps(document))
    assert load(path) == FILE
    document["results"][0]["wire_bytes"] = -1
    path.write_text(json.dumps(document))
    with pytest.raises(ArgumentError, match="-1 as 'wire_bytes' of result 0"):
        load(path)


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    FILE.save(tmp_path / "bench.json")
    tracemalloc.start()
    try:
        load(tmp_path / "bench.json")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_message_shows_the_beginning_of_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(changed(time_us=[0] * 10_000))
    with pytest.raises(ArgumentError, match=r"got \[0, 0.* as 'time_us'") as caught:
        load(tmp_path / "bench.json")
    assert len(str(caught.value)) < 1000
