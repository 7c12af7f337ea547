"""The packages of this repository, as their ``pyproject.toml`` files declare them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nox.project
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["ROOT", "Needs", "Package", "Workspace"]

ROOT = Path(__file__).resolve().parent.parent
# Distributions that are not named like their modules.
MODULES = {"opentelemetry-api": "opentelemetry"}


@dataclass(frozen=True)
class Package:
    """One folder of ``packages/``."""

    name: str
    folder: Path
    pyproject: Mapping[str, Any]

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def version(self) -> str:
        return str(self.pyproject["project"]["version"])

    @property
    def extras(self) -> dict[str, list[str]]:
        return dict(self.pyproject["project"].get("optional-dependencies", {}))

    @property
    def scripts(self) -> list[str]:
        return list(self.pyproject["project"].get("scripts", {}))

    @property
    def test_requirements(self) -> list[str]:
        return list(nox.project.dependency_groups(dict(self.pyproject), "test"))

    def requirements(self, extras: Iterable[str] = ()) -> list[str]:
        """Return what an installer of ``name[extras]`` reads."""
        declared = list(self.pyproject["project"].get("dependencies", []))
        for extra in extras:
            declared += self.extras[extra]
        return declared


@dataclass(frozen=True)
class Needs:
    """The resolved form of a set of requirements.

    ``siblings`` maps every package of this repository that has to be there to the extras it has to have.
    ``others`` are the requirements on everything else, in the words in which they were declared.
    """

    siblings: dict[str, frozenset[str]]
    others: tuple[str, ...]

    @property
    def other_names(self) -> frozenset[str]:
        return frozenset(canonicalize_name(Requirement(text).name) for text in self.others)


class Workspace:
    """All packages, by name."""

    def __init__(self, root: Path = ROOT) -> None:
        self.packages: dict[str, Package] = {}
        for path in sorted(root.glob("packages/*/pyproject.toml")):
            pyproject = nox.project.load_toml(path)
            name = pyproject["project"]["name"]
            self.packages[name] = Package(name, path.parent, pyproject)

    def needs(self, requirements: Iterable[str]) -> Needs:
        """Follow ``requirements`` through the siblings' own, extras included."""
        siblings: dict[str, set[str]] = {}
        others: dict[str, None] = {}
        todo = list(requirements)
        while todo:
            text = todo.pop()
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate():
                continue
            name = canonicalize_name(requirement.name)
            package = self.packages.get(name)
            if package is None:
                others[text] = None
                continue
            known = siblings.get(name)
            if known is None:
                todo += package.requirements()
                known = siblings[name] = set()
            for extra in requirement.extras - known:
                todo += package.extras[extra]
                known.add(extra)
        return Needs({name: frozenset(siblings[name]) for name in sorted(siblings)}, tuple(sorted(others)))

    def extras_with_siblings(self) -> list[tuple[Package, str]]:
        """Extras that bring a further package of this repository along, such as ``comm-orchestrator[ccl]``."""
        return [
            (package, extra)
            for package in self.packages.values()
            for extra, requirements in package.extras.items()
            if set(self.needs(requirements).siblings) - {package.name}
        ]

    def extras_only_modules(self, package: Package) -> list[str]:
        """Modules that only an extra of ``package`` brings, so that importing ``package`` may not load them.

        A module is taken to be named like its distribution, with underscores, unless ``MODULES`` has another name.
        """
        base = self.needs([package.name])
        full = self.needs([f"{package.name}[{','.join(package.extras)}]"] if package.extras else [package.name])
        names = (full.other_names - base.other_names) | (set(full.siblings) - set(base.siblings))
        return sorted(MODULES.get(name, name.replace("-", "_")) for name in names)
