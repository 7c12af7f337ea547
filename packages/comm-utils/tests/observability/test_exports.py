"""Exports: other programs read back what was recorded, and never see half a file."""

from __future__ import annotations

import csv
import json
import os
import re
import stat
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from comm_utils import operations
from comm_utils.csv_cells import cell
from comm_utils.errors import ArgumentError
from comm_utils.observability.comms_logger import Row
from comm_utils.observability.exports import FORMATS, export, write_csv, write_jsonl, write_prometheus
from comm_utils.observability.exports.facts import COLUMNS
from comm_utils.observability.exports.groups import format_ranks

ROW = Row(
    name="gradients",
    operation="all_reduce",
    size_bytes=4096,
    world_size=2,
    calls=10,
    total_bytes=40960,
    total_s=0.0021,
    min_s=0.0001,
    median_s=0.0002,
    p95_s=0.0003,
    max_s=0.0004,
    algbw_gb_per_s=0.02048,
    busbw_gb_per_s=0.02048,
    ranks=(0, 1),
)

SECONDS = st.floats(0, 1e6)
COUNTS = st.integers(0, 2**62)
GROUPS = st.lists(st.integers(0, 4096), min_size=1, max_size=40, unique=True).map(tuple)
ROWS = st.lists(
    st.builds(
        Row,
        name=st.text(),
        operation=st.sampled_from(sorted(operations.recorded())),
        size_bytes=COUNTS,
        world_size=COUNTS,
        calls=COUNTS,
        total_bytes=COUNTS,
        total_s=SECONDS,
        min_s=SECONDS,
        median_s=SECONDS,
        p95_s=SECONDS,
        max_s=SECONDS,
        algbw_gb_per_s=SECONDS,
        busbw_gb_per_s=SECONDS,
        ranks=GROUPS,
        caller=st.text(),
    ),
    max_size=4,
    unique_by=lambda row: (row.name, row.operation, row.size_bytes, row.world_size, row.ranks, row.caller),
)
FACTS = st.fixed_dictionaries({"rank": st.integers(0, 4096), "host": st.text()})
in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@in_one_folder
@given(ROWS, FACTS)
def test_json_lines(tmp_path: Path, rows: list[Row], facts: dict[str, Any]) -> None:
    path = tmp_path / "comm.jsonl"
    write_jsonl(path, rows, **facts)
    lines = path.read_bytes().decode().split("\n")
    assert lines.pop() == ""
    found = [json.loads(line) for line in lines]
    assert [{name: one.pop(name) for name in facts} for one in found] == [facts] * len(rows)
    assert [Row(**{**one, "ranks": tuple(one["ranks"])}) for one in found] == rows


@in_one_folder
@given(ROWS, FACTS)
def test_csv(tmp_path: Path, rows: list[Row], facts: dict[str, Any]) -> None:
    path = tmp_path / "comm.csv"
    write_csv(path, rows, **facts)
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, strict=True)
        found = list(reader)
    assert reader.fieldnames == [*facts, *COLUMNS]
    assert [(int(one["rank"]), one["host"]) for one in found] == [(facts["rank"], cell(facts["host"]))] * len(rows)
    for one, row in zip(found, rows, strict=True):
        assert tuple(int(rank) for rank in one.pop("ranks").split()) == row.ranks
        for name in set(COLUMNS) - {"ranks"}:
            value = getattr(row, name)
            assert type(value)(one[name]) == cell(value)


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "=cmd|' /C calc'!A0"])
def test_no_cell_of_csv_is_a_formula(tmp_path: Path, text: str) -> None:
    path = tmp_path / "comm.csv"
    write_csv(path, [replace(ROW, name=text, caller=text)], host=text, balance=-3, share=-0.5)
    with path.open(newline="", encoding="utf-8") as file:
        (found,) = csv.DictReader(file, strict=True)
    assert found["name"] == found["caller"] == found["host"] == f"'{text}"
    assert (found["balance"], found["share"]) == ("-3", "-0.5")
    write_csv(path, [ROW], **{text: 1})
    with path.open(newline="", encoding="utf-8") as file:
        assert f"'{text}" in next(csv.reader(file, strict=True))


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of a file, as Prometheus' own parser reads it."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.type == ("summary" if family.name == "comm_operation_seconds" else "counter"), family
        assert family.documentation
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, key
            assert sample.timestamp is None
            found[key] = sample.value
    return found


@in_one_folder
@given(ROWS, FACTS)
def test_prometheus(tmp_path: Path, rows: list[Row], facts: dict[str, Any]) -> None:
    path = tmp_path / "comm.prom"
    write_prometheus(path, rows, **facts)
    found = samples(path.read_bytes().decode())
    expected = {}
    callers = any(row.caller for row in rows)
    for row in rows:
        labels = {
            "operation": row.operation,
            "name": row.name,
            "size_bytes": str(row.size_bytes),
            "world_size": str(row.world_size),
            "ranks": format_ranks(row.ranks),
            "rank": str(facts["rank"]),
            "host": facts["host"],
        }
        if callers:
            labels["caller"] = row.caller
        values = {
            ("comm_operations_total", ""): row.calls,
            ("comm_bytes_total", ""): row.total_bytes,
            ("comm_seconds_total", ""): row.total_s,
            ("comm_operation_seconds", "0"): row.min_s,
            ("comm_operation_seconds", "0.5"): row.median_s,
            ("comm_operation_seconds", "0.95"): row.p95_s,
            ("comm_operation_seconds", "1"): row.max_s,
            ("comm_operation_seconds_sum", ""): row.total_s,
            ("comm_operation_seconds_count", ""): row.calls,
        }
        for (name, share), value in values.items():
            more = {"quantile": share} if share else {}
            expected[name, frozenset({**labels, **more}.items())] = value
    assert found == expected


def test_prometheus_as_text(tmp_path: Path) -> None:
    path = tmp_path / "comm.prom"
    write_prometheus(path, [replace(ROW, name='say "hi"\\\n')], rank=1)
    lines = path.read_text().splitlines()
    assert lines[:2] == [
        "# HELP comm_operations_total Communication operations that ended.",
        "# TYPE comm_operations_total counter",
    ]
    labels = r'operation="all_reduce",name="say \"hi\"\\\n",size_bytes="4096",world_size="2",ranks="0 1",rank="1"'
    assert lines[2] == f"comm_operations_total{{{labels}}} 10"
    assert "# TYPE comm_operation_seconds summary" in lines
    assert f'comm_operation_seconds{{{labels},quantile="0.95"}} 0.0003' in lines


def test_lone_surrogates_are_escaped(tmp_path: Path) -> None:
    row = replace(ROW, name="\udc80")
    for name in FORMATS:
        export(tmp_path / f"comm.{name}", [row])
    assert json.loads((tmp_path / "comm.jsonl").read_text())["name"] == "\udc80"
    assert (tmp_path / "comm.csv").read_text().splitlines()[1].startswith("\\udc80,all_reduce")
    assert {dict(labels)["name"] for _, labels in samples((tmp_path / "comm.prom").read_text())} == {"\\udc80"}


@pytest.mark.parametrize("name", FORMATS)
def test_the_name_chooses(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"comm.{name}"
    export(str(path), [ROW], rank=0, time="2026-01-31T12:00:00Z")
    first = path.read_text().splitlines()[0]
    begins = {"jsonl": '{"rank": 0, "time": "2026', "csv": "rank,time,name,", "prom": "# HELP comm_operations_total "}
    assert first.startswith(begins[name])
    other = tmp_path / "other.text"
    if name != "prom":
        export(other, [ROW], format=name, rank=0, time="2026-01-31T12:00:00Z")
        assert other.read_bytes() == path.read_bytes()


def test_the_time_is_no_label(tmp_path: Path) -> None:
    export(tmp_path / "comm.prom", [ROW], rank=0, time=1.5)
    assert "time=" not in (tmp_path / "comm.prom").read_text()


def test_prometheus_under_another_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_prometheus(tmp_path / "comm.prom", [ROW])
    assert not caplog.records
    write_prometheus(tmp_path / "comm.txt", [ROW])
    assert re.search(r"comm\.txt: node_exporter reads only files whose names end with \.prom", caplog.text)


def test_nothing_was_recorded(tmp_path: Path) -> None:
    for name in FORMATS:
        export(tmp_path / f"comm.{name}", [], rank=0)
    assert (tmp_path / "comm.jsonl").read_text() == ""
    assert (tmp_path / "comm.csv").read_text().splitlines() == [",".join(["rank", *COLUMNS])]
    assert samples((tmp_path / "comm.prom").read_text()) == {}


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        (
            "comm.txt",
            {},
            r"got '.*comm\.txt', expected a name that ends with \.jsonl or \.csv or \.prom; or give",
        ),
        ("comm", {}, "expected a name that ends with"),
        ("comm.csv", {"format": "xml"}, "got format='xml', expected one of 'jsonl', 'csv', 'prom'"),
        ("comm.csv", {"calls": 3}, "got the fact 'calls', which is a column of every row"),
        ("comm.jsonl", {"ranks": 3}, "got the fact 'ranks', which is a column"),
        ("comm.csv", {"hosts": ["a"]}, "hosts: got a list, expected text, a number"),
        ("comm.jsonl", {"load": float("nan")}, "JSON has neither infinity nor NaN"),
        ("comm.prom", {"quantile": "a"}, "got the label 'quantile'"),
        ("comm.prom", {"__host": "a"}, "got the label '__host'"),
        ("comm.prom", {"hôte": "a"}, "got the label 'hôte'"),
        ("none/comm.csv", {}, r"there is no folder '.*none'; create it, or give another path"),
        ("file/comm.csv", {}, "file is not a folder"),
        ("folder.csv", {}, "got a folder, expected the path of a file"),
    ],
)
def test_refused(tmp_path: Path, path: str, options: dict[str, Any], message: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ArgumentError, match=message):
        export(tmp_path / path, [ROW], **options)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder.csv"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_what_was_there(tmp_path: Path, name: str, error: type[BaseException]) -> None:
    path = tmp_path / f"comm.{name}"
    path.write_text("before")

    def rows() -> Iterator[Row]:
        yield ROW
        raise error("of the rows")

    with pytest.raises(error, match=r"^of the rows$"):
        export(path, rows())
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", FORMATS)
def test_nobody_reads_half_a_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"comm.{name}"
    rows = [replace(ROW, size_bytes=size) for size in range(300)]
    export(path, rows)
    whole, seen, done = path.read_bytes(), set(), threading.Event()

    def write() -> None:
        for _ in range(20):
            export(path, rows)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        seen.add(path.read_bytes())
    writer.join()
    assert seen == {whole}
    assert list(tmp_path.iterdir()) == [path]


def test_who_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "comm.csv"
    before = os.umask(0o027)
    try:
        export(path, [ROW])
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        export(path, [ROW])
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
    finally:
        os.umask(before)


def test_links_devices_and_long_names(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "comm.csv", tmp_path / "elsewhere" / "real.csv"
    link.symlink_to(target)
    export(link, [ROW])
    assert link.is_symlink()
    assert target.read_text().startswith("name,")
    export("/dev/null", [ROW], format="csv")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    long = tmp_path / ("n" * 250 + ".csv")
    export(long, [ROW])
    assert long.stat().st_size > 0


def test_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "comm.csv"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        export(pipe, [ROW])
        got, _ = reader.communicate(timeout=30)
    assert got.startswith("name,operation,")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""),
        ((0,), "0"),
        ((3, 1), "3 1"),
        (tuple(range(8)), "0 1 2 3 4 5 6 7"),
        (tuple(range(9)), "0-8"),
        ((*range(0, 64, 8), 57), "0-56:8 57"),
        ((*range(16), *range(32, 48)), "0-15 32-47"),
        ((9, *range(8)), "9 0-7"),
    ],
)
def test_groups(ranks: tuple[int, ...], text: str) -> None:
    assert format_ranks(ranks) == text


def expanded(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split():
        run, _, step = part.partition(":")
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return tuple(found)


@given(GROUPS)
def test_groups_can_be_read(ranks: tuple[int, ...]) -> None:
    text = format_ranks(ranks)
    assert len(text) <= 60
    if "..." in text:
        assert re.fullmatch(rf"{ranks[0]} {ranks[1]} \.\.\. {ranks[-1]} \({len(ranks)} ranks, [0-9a-f]{{8}}\)", text)
        assert text != format_ranks((*ranks[:-2], 5000, ranks[-1]))
    else:
        assert expanded(text) == ranks
