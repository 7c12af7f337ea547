"""One version for all packages: set in one command, and in step."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path

import pytest

import bump_version
from workspace import ROOT, Workspace

DAY = datetime.date(2030, 1, 31)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy this repository's own pyproject.toml files, beside a short changelog."""
    for path in ROOT.glob("packages/*/pyproject.toml"):
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True)
        shutil.copy(path, target)
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## Unreleased\n\n- A new thing.\n")
    return tmp_path


def test_this_repository_is_in_step() -> None:
    assert list(bump_version.problems(ROOT)) == []


def test_bump_sets_versions_pins_and_heading(copy: Path) -> None:
    before = {path: path.read_text() for path in copy.glob("packages/*/pyproject.toml")}
    old = Workspace(copy).packages["comm-utils"].version
    bump_version.bump(copy, "9.8.7rc1", DAY)

    assert list(bump_version.problems(copy)) == []
    for path, text in before.items():
        assert path.read_text() == text.replace(f'version = "{old}"', 'version = "9.8.7rc1"').replace(
            f"=={old}", "==9.8.7rc1"
        )
    changelog = (copy / "CHANGELOG.md").read_text()
    assert changelog == "# Changes\n\n## Unreleased\n\n## 9.8.7rc1 (2030-01-31)\n\n- A new thing.\n"
    declared = [
        text
        for package in Workspace(copy).packages.values()
        for text in [*package.requirements(package.extras), *package.test_requirements]
        if text.startswith("comm-")
    ]
    assert declared
    assert all(text.endswith("==9.8.7rc1") for text in declared)


@pytest.mark.parametrize("released", [None, "\n", "\n- A new thing.\n\n"], ids=["real", "just released", "later"])
def test_bump_of_a_longer_changelog(copy: Path, released: str | None) -> None:
    """What stood under "Unreleased" stands under the new version; nothing else changes."""
    version = Workspace(copy).packages["comm-utils"].version
    text = f"# Changes\n\n## Unreleased\n{released}## {version} (2029-01-31)\n\n- An old thing.\n"
    if released is None:
        text = (ROOT / "CHANGELOG.md").read_text()
    (copy / "CHANGELOG.md").write_text(text)
    assert list(bump_version.problems(copy)) == []
    head, separator, entries = text.partition("## Unreleased\n")
    assert separator, "CHANGELOG.md has no heading 'Unreleased'"

    bump_version.bump(copy, "9.8.7", DAY)
    assert list(bump_version.problems(copy)) == []
    assert (copy / "CHANGELOG.md").read_text() == f"{head}## Unreleased\n\n## 9.8.7 (2030-01-31)\n{entries}"


def test_bump_twice(copy: Path) -> None:
    bump_version.bump(copy, "9.8.7", DAY)
    bump_version.bump(copy, "9.8.8", DAY)
    assert list(bump_version.problems(copy)) == []


@pytest.mark.parametrize("version", ["1.2", "v1.2.3", "1.2.3.dev1", ""])
def test_bump_refuses_other_versions(copy: Path, version: str) -> None:
    with pytest.raises(ValueError, match="expected one like"):
        bump_version.bump(copy, version, DAY)


@pytest.mark.parametrize("version", ["9.8.7", "9.8.7rc1", "9.8.6", "0.0.1"])
def test_bump_refuses_what_is_not_newer(copy: Path, version: str) -> None:
    for earlier in ("9.8.7a2", "9.8.7a10", "9.8.7b1", "9.8.7rc1", "9.8.7"):
        bump_version.bump(copy, earlier, DAY)
    before = {path: path.read_text() for path in copy.rglob("*.*") if path.is_file()}
    with pytest.raises(ValueError, match=rf"got version {version}, expected one newer than 9\.8\.7, the newest in"):
        bump_version.bump(copy, version, DAY)
    assert {path: path.read_text() for path in before} == before


def test_bump_needs_an_unreleased_heading(copy: Path) -> None:
    (copy / "CHANGELOG.md").write_text("# Changes\n")
    with pytest.raises(ValueError, match="## Unreleased"):
        bump_version.bump(copy, "9.8.7", DAY)
    assert list(bump_version.problems(copy)) == []


@pytest.mark.parametrize(
    ("package", "old", "new", "problem"),
    [
        ("comm-config", 'version = "{version}"', 'version = "9.9.9"', "have one version"),
        ("comm-orchestrator", "comm-config=={version}", "comm-config==0.0.1", "got comm-config==0.0.1, expected"),
        ("comm-orchestrator", "comm-config=={version}", "comm-config>=0.0.1", "got comm-config>=0.0.1, expected"),
        ("comm-orchestrator", "comm-utils[testing]=={version}", "comm-utils[testing]", "got comm-utils[testing], exp"),
    ],
)
def test_check_names_what_is_out_of_step(copy: Path, package: str, old: str, new: str, problem: str) -> None:
    path = copy / "packages" / package / "pyproject.toml"
    text = path.read_text()
    old = old.format(version=Workspace(copy).packages[package].version)
    assert old in text
    path.write_text(text.replace(old, new, 1))
    (found,) = bump_version.problems(copy)
    assert problem in found


def test_check_reads_the_changelog(copy: Path) -> None:
    (copy / "CHANGELOG.md").write_text("# Changes\n\n## 99.0.0\n")
    (found,) = bump_version.problems(copy)
    assert "newest release is 99.0.0" in found


def test_command_line(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bump_version.main(["--check"], copy) == 0
    assert bump_version.main(["9.8.7"], copy) == 0
    assert capsys.readouterr().out == "all packages and pins are in step\n" * 2
    with pytest.raises(SystemExit):
        bump_version.main(["9.8"], copy)
