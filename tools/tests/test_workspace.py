"""Declared requirements are followed through siblings and extras, and the packages here declare them in step."""

from __future__ import annotations

import re
from pathlib import Path

import nox.project
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from workspace import ROOT, Workspace

PACKAGE = """
[project]
name = "{name}"
version = "1.0"
dependencies = {dependencies}

[project.optional-dependencies]
{extras}

[dependency-groups]
test = ["pytest", {{ include-group = "more" }}]
more = ["hypothesis"]
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    def add(name: str, dependencies: list[str], extras: str = "") -> None:
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(PACKAGE.format(name=name, dependencies=dependencies, extras=extras))

    add("low", [], 'testing = ["torch>=2"]')
    add("left", ["low==1.0", "pydantic"])
    add("right", ["low==1.0"])
    add("top", ["left==1.0"], 'more = ["right==1.0"]\ncli = ["typer", "low[testing]==1.0"]')
    return Workspace(tmp_path)


def test_needs_follow_siblings(workspace: Workspace) -> None:
    needs = workspace.needs(["top", "pytest>=8"])
    assert needs.siblings == {"left": frozenset(), "low": frozenset(), "top": frozenset()}
    assert needs.others == ("pydantic", "pytest>=8")


def test_needs_follow_extras(workspace: Workspace) -> None:
    needs = workspace.needs(["top[more,cli]"])
    assert needs.siblings == {
        "left": frozenset(),
        "low": {"testing"},
        "right": frozenset(),
        "top": {"more", "cli"},
    }
    assert needs.other_names == {"pydantic", "torch", "typer"}


def test_an_extra_asked_for_later_counts(workspace: Workspace) -> None:
    assert workspace.needs(["low[testing]", "low"]) == workspace.needs(["low", "low[testing]"])
    assert workspace.needs(["low", "low[testing]"]).others == ("torch>=2",)


def test_markers_are_evaluated(workspace: Workspace) -> None:
    assert workspace.needs(["right; python_version < '3'"]).siblings == {}


def test_extras_with_siblings(workspace: Workspace) -> None:
    assert [(package.name, extra) for package, extra in workspace.extras_with_siblings()] == [
        ("top", "more"),
        ("top", "cli"),
    ]


def test_modules_that_only_an_extra_brings(workspace: Workspace) -> None:
    assert workspace.extras_only_modules(workspace.packages["low"]) == ["torch"]
    assert workspace.extras_only_modules(workspace.packages["left"]) == []
    assert workspace.extras_only_modules(workspace.packages["top"]) == ["right", "torch", "typer"]


def test_modules_may_have_another_name_than_their_distribution() -> None:
    modules = WORKSPACE.extras_only_modules(PACKAGES["comm-orchestrator"])
    assert "opentelemetry" in modules
    assert "opentelemetry_api" not in modules


def test_groups_include_groups(workspace: Workspace) -> None:
    assert workspace.packages["low"].test_requirements == ["pytest", "hypothesis"]


WORKSPACE = Workspace()
PACKAGES = WORKSPACE.packages


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_is_laid_out_like_the_others(name: str) -> None:
    package = PACKAGES[name]
    assert package.folder.name == name
    assert (package.folder / "README.md").is_file()
    assert (package.folder / "src" / package.module / "__init__.py").is_file()
    assert (package.folder / "src" / package.module / "py.typed").is_file()
    assert sorted((package.folder / "tests").rglob("test_*.py"))


def test_constraints_pin_what_ci_installs() -> None:
    """Everything that a package or a session asks for by name has its version in ``constraints.txt``."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [pin for pin in map(Requirement, (line for line in lines if line[:1].isalpha())) if applies(pin)]
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    groups = nox.project.load_toml(ROOT / "pyproject.toml")
    asked = [*PACKAGES, *nox.project.dependency_groups(groups, *groups["dependency-groups"])]
    for package in PACKAGES.values():
        asked += package.test_requirements + package.pyproject["build-system"]["requires"]
    assert sorted(WORKSPACE.needs(asked).other_names - {canonicalize_name(pin.name) for pin in pins}) == []


def applies(pin: Requirement) -> bool:
    return pin.marker is None or pin.marker.evaluate()


def test_what_is_promised_is_what_compat_tests() -> None:
    """``nox -s compat`` runs the first and the last Python and torch that the metadata admits."""
    noxfile = (ROOT / "noxfile.py").read_text()
    pairs = dict(re.findall(r'"(oldest|newest)": \("([\d.]+", "[\d.]+)"\)', noxfile))
    (oldest_python, oldest_torch), (newest_python, newest_torch) = (
        pairs[age].split('", "') for age in ("oldest", "newest")
    )
    for package in PACKAGES.values():
        project = package.pyproject["project"]
        assert_ends(SpecifierSet(project["requires-python"]), oldest_python, newest_python)
        classified = [c.rpartition(" ")[2] for c in project["classifiers"] if "Python :: 3." in c]
        assert (classified[0], classified[-1]) == (oldest_python, newest_python)
        for text in package.requirements(package.extras):
            requirement = Requirement(text)
            if requirement.name == "torch":
                assert_ends(requirement.specifier, oldest_torch, newest_torch)


def assert_ends(specifier: SpecifierSet, oldest: str, newest: str) -> None:
    def minor(version: str, step: int) -> str:
        major, number = map(int, version.split(".")[:2])
        return f"{major}.{number + step}.0"

    assert minor(oldest, 0) in specifier
    assert minor(oldest, -1) not in specifier
    assert minor(newest, 0) in specifier
    assert minor(newest, 1) not in specifier


def test_every_package_carries_the_licence() -> None:
    text = (ROOT / "LICENSE").read_text()
    for package in Workspace(ROOT).packages.values():
        assert (package.folder / "LICENSE").read_text() == text, package.name
