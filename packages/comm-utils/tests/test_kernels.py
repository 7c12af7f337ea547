"""Kernels are found through entry points, once; where there is none, or it cannot be loaded, callers are told so."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comm_utils import kernels
from comm_utils.reduce_op import ReduceOp

NOTHING: Any = object()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    kernels._kernel.cache_clear()
    yield
    kernels._kernel.cache_clear()


def install(folder: Path, name: str, code: str) -> None:
    """A distribution whose module ``name`` offers ``reduce``."""
    (folder / f"{name}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{kernels.ENTRY_POINT_GROUP}]\nreduce = {name}:reduce\n")


def test_without_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert not kernels.reduce(NOTHING, [NOTHING], ReduceOp.SUM)


def test_an_installed_one_is_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path, "fast_sums", "calls = []\ndef reduce(*given):\n    calls.append(given)\n    return True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert kernels.reduce(NOTHING, [NOTHING], ReduceOp.MAX)
    import fast_sums  # type: ignore[import-not-found]

    assert fast_sums.calls == [(NOTHING, [NOTHING], ReduceOp.MAX)]


def test_one_that_cannot_be_loaded_is_named_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, "broken_sums", "raise ImportError('no such instruction')\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with caplog.at_level(logging.WARNING, logger="comm"):
        assert not kernels.reduce(NOTHING, [NOTHING], ReduceOp.SUM)
        assert not kernels.reduce(NOTHING, [NOTHING], ReduceOp.SUM)
    assert [record.getMessage() for record in caplog.records] == [
        "the kernel reduce of broken_sums:reduce cannot be used: no such instruction"
    ]
