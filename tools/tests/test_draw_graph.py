import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import draw_graph
from workspace import ROOT, Workspace


def test_the_drawing_is_up_to_date() -> None:
    assert draw_graph.main(["--check"]) == 0


def test_every_package_has_a_box_and_every_dependency_an_arrow() -> None:
    svg = ElementTree.fromstring(draw_graph.draw())
    space = "{http://www.w3.org/2000/svg}"
    boxes = {text.text for text in svg.iter(f"{space}text")}
    assert {package.module for package in Workspace(ROOT).packages.values()} <= boxes
    assert len(list(svg.iter(f"{space}line"))) == len(draw_graph.arrows(Workspace(ROOT)))


def test_arrows_run_down_the_layers() -> None:
    centres = draw_graph.places(draw_graph.layers(ROOT))
    for source, target, _ in draw_graph.arrows(Workspace(ROOT)):
        assert centres[source][1] < centres[target][1], f"{source} -> {target}"


def test_a_drawing_of_another_day_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in [ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml")]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    (tmp_path / "docs").mkdir()
    assert draw_graph.main([], tmp_path) == 0
    assert draw_graph.main(["--check"], tmp_path) == 0
    config = tmp_path / "packages" / "comm-config" / "pyproject.toml"
    config.write_text(config.read_text().replace("dependencies = [", 'dependencies = ["comm-utils==0.1.0", '))
    assert draw_graph.main(["--check"], tmp_path) == 1
    assert "out of date" in capsys.readouterr().err
