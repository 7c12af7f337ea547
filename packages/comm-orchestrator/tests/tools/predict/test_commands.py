"""``commctl fit`` and ``commctl predict`` as people and programs see them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from comm_orchestrator.tools.commands import app
from comm_utils.observability.bench_results import BenchFile, BenchResult
from comm_utils.observability.traces import Event, Operation, RankTrace
from comm_utils.observability.traces.file import save

NOT_MEASURED = "predicted by a model, not measured"


@dataclass
class Shown:
    returncode: int
    stdout: str
    stderr: str


Commctl: TypeAlias = Callable[..., Shown]


@pytest.fixture
def commctl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Commctl:
    """The command in this process, which saves a second of imports each time."""
    monkeypatch.setenv("COLUMNS", "240")

    def run(*arguments: object) -> Shown:
        monkeypatch.setattr(sys, "argv", ["commctl", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            app()
        captured = capsys.readouterr()
        return Shown(ended.value.code or 0, captured.out, captured.err)  # type: ignore[arg-type]

    return run


def in_a_process(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "240", **variables}
    command = [sys.executable, "-m", "comm_orchestrator", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def result(ranks: int, size: int, time_us: float) -> BenchResult:
    return BenchResult(
        *("all_reduce", "ours", "gloo", "in_place", "float32", "sum", -1, ranks, 1, 1, size, size // 4, 20),
        *(time_us, time_us, time_us, time_us, time_us, time_us, (time_us,), 0.0, 0.0, 0),
    )


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """What a ring of 10 µs and 1 GB/s would take."""
    results = [
        result(ranks, size, 2 * (ranks - 1) * 10 + 2 * (ranks - 1) / ranks * size * 1e-3)
        for ranks in (2, 4)
        for size in (8 * 4**i for i in range(10))
    ]
    BenchFile("2026-01-01T00:00:00", "made by a test", {}, {}, tuple(results)).save(tmp_path / "bench.json")
    return tmp_path / "bench.json"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    what = Operation("all_reduce", "all_reduce", 1 << 20, (0, 1), "0", "float32", "sum")
    events = [
        Event(what, number, number * 10**7, number * 10**7 + 10**6, number * 10**7 + 10**6) for number in range(4)
    ]
    for rank in (0, 1):
        save(tmp_path / "trace", RankTrace(rank, 2, host="a", backend="gloo", events=events))
    return tmp_path / "trace"


def test_fit_prints_and_writes_a_model(commctl: Commctl, bench: Path, tmp_path: Path) -> None:
    model, picture = tmp_path / "model.json", tmp_path / "residuals.svg"
    shown = commctl("fit", bench, "-o", model, "--plot", picture, "--hold-out", "sizes")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("a model: latency (alpha) and bandwidth (1/beta) fitted to measurements")
    assert f"every other size left out, {NOT_MEASURED}" in shown.stdout
    (row,) = [line for line in shown.stdout.splitlines() if "out of place" not in line and "8 B - 2 MiB" in line]
    assert "ring" in row
    assert row.split("ring")[1].split()[:2] == ["10", "1"]
    data = json.loads(model.read_text())
    assert (data["format"], data["version"]) == ("comm-model", 1)
    assert NOT_MEASURED in data["what"]
    (fit,) = data["fits"]
    assert (fit["world_sizes"], fit["sizes_bytes"]) == ([2, 4], [8, 2 << 20])
    assert len(fit["points"]) == 20
    drawn = picture.read_text()
    assert "A model" in drawn
    assert len(drawn) < 150_000
    commctl("fit", bench, "--plot", tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == drawn


def test_what_is_held_out_world_by_world(commctl: Commctl, bench: Path) -> None:
    shown = commctl("fit", bench, "--hold-out", "world-sizes")
    assert "each number of ranks left out in turn" in shown.stdout


def test_predict_prints_and_writes_a_prediction(commctl: Commctl, bench: Path, trace: Path, tmp_path: Path) -> None:
    model, file = tmp_path / "model.json", tmp_path / "prediction.json"
    assert commctl("fit", bench, "-o", model).returncode == 0
    options = ("--nodes", 4, "--ranks-per-node", 8, "--network", "5us,100Gbit", "--steps", 4, "--json", file)
    shown = commctl("predict", trace, "--model", model, *options)
    assert shown.returncode == 0, shown.stderr
    first = shown.stdout.splitlines()[0]
    assert first == f"4 x 8 ranks over 5 µs, 100 Gbit/s: {NOT_MEASURED} (ours/gloo)"
    for words in (
        "all_reduce",
        "32 on 4 hosts",
        "whole job",
        "a step",
        "weak scaling",
        "network: the network is a given",
    ):
        assert words in shown.stdout
    data = json.loads(file.read_text())
    assert (data["format"], data["version"], data["what"]) == ("comm-prediction", 1, NOT_MEASURED)
    whole = data["predicted_by_a_model"]["whole_job"]
    each_s = (62 * 15 + 62 / 32 * (1 << 20) * 1e-3) / 1e6
    assert whole["value_s"] == pytest.approx(0.027 + 4 * each_s)
    assert whole["low_s"] < whole["value_s"] < whole["high_s"]
    assert data["recorded"]["whole_job_s"] == pytest.approx(0.031)


def test_as_recorded_by_default(commctl: Commctl, bench: Path, trace: Path, tmp_path: Path) -> None:
    commctl("fit", bench, "-o", tmp_path / "model.json")
    shown = commctl("predict", trace, "--model", tmp_path / "model.json")
    assert shown.stdout.startswith(f"1 x 2 ranks: {NOT_MEASURED}")
    assert "weak scaling" not in shown.stdout


FIT = ("fit", "{bench}")
PREDICT = ("predict", "{trace}", "--model", "{model}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("fit", "{folder}/none.json"), "none.json: No such file"),
        (("fit", "{trace}/rank0.jsonl"), "expected a file of format 'comm-bench'"),
        ((*FIT, "--hold-out", "colours"), "got 'colours'; expected sizes or world-sizes"),
        ((*FIT, "--time", "p42"), "got 'p42'"),
        ((*FIT, "--link", "fast"), "--link: got 'fast'; expected a latency and a bandwidth"),
        ((*FIT, "--plot", "residuals.txt"), "expected a name that ends in .svg, .png, .pdf"),
        (
            (*FIT, "-o", "{folder}/x.svg", "--plot", "{folder}/x.svg"),
            "x.svg, where the model is written; expected another",
        ),
        ((*FIT, "-o", "{bench}"), "got one of the bench files to write to"),
        ((*FIT, "-o", "{folder}/no/such/folder.json"), "there is no folder"),
        ((*PREDICT, "--network", "5,100"), "5us,100Gbit"),
        ((*PREDICT, "--nodes", "0"), "--nodes: got 0; expected 1 to"),
        ((*PREDICT, "--nodes", "4"), "no fit of all_reduce between hosts"),
        ((*PREDICT, "--subgroups", "split"), "expected keep or mesh"),
        ((*PREDICT, "--library", "theirs"), "no fit of theirs/any backend; it has: ours/gloo"),
        ((*PREDICT, "--json", "{model}"), "which is the model"),
        (("predict", "{folder}", "--model", "{model}"), "no trace here"),
        (("predict", "{trace}", "--model", "{bench}"), "format 'comm-bench'; expected a file of format 'comm-model'"),
        (("predict", "{trace}", "--model", "{folder}/none.json"), "No such file"),
    ],
)
def test_wrong_usage_gets_a_sentence(
    commctl: Commctl, bench: Path, trace: Path, tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    model = tmp_path / "model.json"
    if "{model}" in arguments:
        assert commctl("fit", bench, "-o", model).returncode == 0
    names = {"bench": bench, "trace": trace, "model": model, "folder": tmp_path}
    before = sorted(tmp_path.rglob("*"))
    shown = commctl(*(argument.format(**names) for argument in arguments))
    assert shown.returncode == 2
    assert expected in shown.stderr
    assert shown.stderr.count("\n") == 1
    assert shown.stderr.startswith("error: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_without_matplotlib_a_plot_is_refused_with_the_remedy(bench: Path, tmp_path: Path) -> None:
    hiding = tmp_path / "hiding"
    hiding.mkdir()
    (hiding / "matplotlib.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'matplotlib'\", name='matplotlib')"
    )
    shown = in_a_process("fit", bench, "--plot", tmp_path / "r.svg", "-o", tmp_path / "m.json", PYTHONPATH=str(hiding))
    assert shown.returncode == 2
    assert "--plot: needs matplotlib; install it with: pip install 'comm-orchestrator[plot]'" in shown.stderr
    assert not (tmp_path / "m.json").exists()


def test_a_terminal_that_knows_ascii_only_gets_a_table(bench: Path) -> None:
    shown = in_a_process("fit", bench, PYTHONIOENCODING="ascii")
    assert shown.returncode == 0, shown.stderr
    assert "ring" in shown.stdout


def slowly(*values: Any) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("sizes", [(64, 2**18), (8, 2**33), *slowly((2**11, 5 * 2**12), (2**20, 2**21))])
@pytest.mark.parametrize("slowness", [1.5, 10**5, *slowly(8, 60)])
def test_labels_of_the_picture_of_a_fit_do_not_overlap(
    commctl: Commctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sizes: tuple[int, int], slowness: float
) -> None:
    agg, figure = (pytest.importorskip(f"matplotlib.{name}") for name in ("backends.backend_agg", "figure"))
    made: list[Any] = []
    save = figure.Figure.savefig

    def keep(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(figure.Figure, "savefig", keep)
    least, greatest = sizes
    results = tuple(
        result(2, int(least * (greatest / least) ** (place / 7)), 100 * slowness ** (place / 7)) for place in range(8)
    )
    BenchFile("2026-01-01T00:00:00", "made by a test", {}, {}, results).save(tmp_path / "bench.json")
    assert commctl("fit", tmp_path / "bench.json", "--plot", tmp_path / "it.png").returncode == 0
    canvas = agg.FigureCanvasAgg(made[0])
    canvas.draw()
    for axes in made[0].axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = [label for label in axis.get_ticklabels(which="both") if label.get_text()]
            boxes = {label.get_text(): label.get_window_extent(canvas.get_renderer()) for label in labels}
            assert len(boxes) == len(labels) >= 2
            assert [(a, b) for a, box in boxes.items() for b in boxes if a < b and box.overlaps(boxes[b])] == []
