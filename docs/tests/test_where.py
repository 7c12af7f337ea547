"""docs/where.md names files that exist and hold what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "where.md"
ROW = re.compile(r"^\| (?P<task>[^|]+) \| \[[^\]]+\]\((?P<file>[^)]+)\)[^|]* \| `(?P<text>[^`]+)` \|$", re.MULTILINE)
ROWS = [found.groupdict() for found in ROW.finditer(PAGE.read_text())]
# Tasks that newcomers ask for; the page may have more.
REQUIRED = ("launcher", "gloo's timeout", "column of the summary", "slot size", "subcommand", "reduce op", "counter")


def test_every_row_is_understood() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert len(ROWS) == len(rows) - 1  # all but the heading
    assert [task for task in REQUIRED if not any(task in row["task"] for row in ROWS)] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["task"])
def test_file_holds_it(row: dict[str, str]) -> None:
    assert row["text"] in (PAGE.parent / row["file"]).read_text()
