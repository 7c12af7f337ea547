"""The picture, and the spreadsheet."""

from __future__ import annotations

import csv
import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from comm_orchestrator.tools.bench import results
from comm_orchestrator.tools.bench.plot import plot

Make = Callable[..., Any]


def several(result: Make) -> list[Any]:
    return [
        result(size / 100, (size / 120, size / 80), size_bytes=size, library=library, operation=operation)
        for operation in ("all_reduce", "broadcast")
        for library in ("ours", "torch")
        for size in (8, 1024, 2**20)
    ] + [result(operation="barrier", size_bytes=0)]


def texts(path: Path) -> list[str]:
    return ["".join(one.itertext()).strip() for one in ElementTree.parse(path).iter() if one.tag.endswith("}text")]


def test_svg_has_titles_units_and_libraries_and_is_always_the_same(result: Make, tmp_path: Path) -> None:
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        plot(several(result), str(path), "2 ranks on 1 host")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    found = texts(paths[0])
    for text in ("2 ranks on 1 host", "time per call (µs)", "bus bandwidth (GB/s)", "size (bytes)", "ours/gloo", "2K"):
        assert text in found
    assert found.count("all_reduce, 2 ranks") == found.count("broadcast, 2 ranks") == 2
    assert "barrier, 2 ranks" not in found


def test_lines_are_told_apart_by_what_differs(result: Make, tmp_path: Path) -> None:
    results = [
        result(way=way, dtype=dtype, size_bytes=size)
        for way in ("in_place", "out_of_place")
        for dtype in ("float32", "bfloat16")
        for size in (8, 64)
    ]
    plot(results, str(tmp_path / "a.svg"))
    found = texts(tmp_path / "a.svg")
    assert found.count("ours/gloo in place bfloat16") == 2
    assert found.count("ours/gloo out of place float32") == 2


def test_png_and_a_single_size(result: Make, tmp_path: Path) -> None:
    plot([result(busbw_gb_per_s=0.0)], str(tmp_path / "a.PNG"))
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_fails_leaves_the_old_one(result: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a.svg").write_text("old")
    monkeypatch.setattr("matplotlib.backends.backend_svg.RendererSVG.finalize", fail)
    with pytest.raises(OSError, match="No space left"):
        plot([result()], str(tmp_path / "a.svg"))
    assert (tmp_path / "a.svg").read_text() == "old"


def test_nothing_to_draw(result: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no result with a size"):
        plot([result(operation="barrier", size_bytes=0)], str(tmp_path / "a.svg"))


def test_matplotlib_is_imported_for_a_picture_only() -> None:
    script = (
        "import sys, comm_orchestrator.tools.bench.plot as plot; assert plot.is_available();"
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_csv(result: Make, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    results.write_csv([result(2.5, (2.0, 2.5, 3.0)), result(wrong=None)], str(path))
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["operation"], first["time_us"], first["rounds_us"]) == ("all_reduce", "2.5", "2.000 2.500 3.000")
    assert (first["wrong"], second["wrong"]) == ("0", "")
