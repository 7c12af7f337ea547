"""The table that users of nccl-tests know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from comm_orchestrator.tools.bench.display import Table, closing, number
from comm_orchestrator.tools.bench.plan import Row

Make = Callable[..., Any]
ROW = Row("all_reduce", "float32", "product", -1, 256, 1024)


def test_one_library(result: Make) -> None:
    table = Table([("ours", "gloo")], False)
    titles, columns, units = table.header()
    assert titles.split() == ["#", "out-of-place", "in-place"]
    cells = ["time", "algbw", "busbw", "#wrong"]
    assert columns.split() == ["#", "size", "count", "type", "redop", "root", *cells, *cells]
    assert units.split() == ["#", "(B)", "(elements)", *["(us)", "(GB/s)", "(GB/s)"] * 2]
    (line,) = table.rows(ROW, [result(12.345, wrong=3)])
    values = ["1024", "256", "float32", "prod", "-1"]
    assert line.split() == [*values, *["N/A"] * 4, "12.35", "1.00", "1.00", "3"]
    # Numbers end where their columns do.
    assert line.index("12.35") + 5 == columns.rindex("time") + 4
    assert line.index("1024") + 4 == columns.index("size") + 4


def test_several_libraries_and_percentiles(result: Make) -> None:
    table = Table([("ours", "ccl"), ("torch", "gloo")], True)
    assert table.header()[1].split().count("p99") == 2
    both = [result(way=way, library="torch", wrong=None) for way in ("in_place", "out_of_place")]
    lines = table.rows(ROW, [result(backend="ccl"), *both])
    assert [line.split()[5] for line in lines] == ["ours/ccl", "torch/gloo"]
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split()[6:] == ["10.00", "1.00", "1.00", "N/A", "10.00", "10.00", "10.00", "10.00"] * 2


@pytest.mark.parametrize("percentiles", [False, True])
@pytest.mark.parametrize("libraries", [[("ours", "gloo")], [("ours", "ccl"), ("torch", "gloo"), ("deepspeed", "gloo")]])
def test_a_narrow_table_fits_80_columns(result: Make, libraries: list[tuple[str, str]], percentiles: bool) -> None:
    table = Table(libraries, percentiles, narrow=True)
    row = Row("broadcast", "float8_e4m3fn", "", 12, 2**28, 2**30)
    found = [
        result(123456.7, way=way, library=name, backend=backend, busbw_gb_per_s=0.0012, size_bytes=2**30)
        for name, backend in libraries
        for way in ("out_of_place", "in_place")
    ]
    (header,), lines = table.header(), table.rows(row, found)
    assert lines[0] == "# float8_e4m3fn root 12"
    assert len(lines) == 1 + len(found)
    assert max(map(len, [header, *lines])) <= 80
    for line, one in zip(lines[1:], found, strict=True):
        assert len(line) == len(header)
        assert all(text in line.split() for text in ("123457", "0.0012", "in" if one.way == "in_place" else "out"))
    assert table.rows(row, found) == lines[1:]  # the type is said once


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00"),
        (0.0032, "0.0032"),
        (3.21e-5, "3.2e-05"),
        (1.234, "1.23"),
        (999.994, "999.99"),
        (1234.56, "1234.6"),
        (123456.7, "123457"),
        (1.5e8, "1.5e+08"),
    ],
)
def test_numbers_fit(value: float, text: str) -> None:
    assert number(value) == text


def test_the_end(result: Make) -> None:
    assert closing([result(), result(busbw_gb_per_s=3.0)]) == [
        "# Out of bounds values : 0 OK",
        "# Avg bus bandwidth    : 2 GB/s",
    ]
    found = closing([result(wrong=2), result(library="torch"), result(operation="barrier", wrong=None)])
    assert found == [
        "# Out of bounds values : 2 FAILED",
        "# Avg bus bandwidth    : 1 GB/s (ours/gloo)",
        "# Avg bus bandwidth    : 1 GB/s (torch/gloo)",
    ]
    assert closing([result(wrong=None)])[0] == "# Out of bounds values : not checked"
