"""Every import contract catches what it is there for: a planted violation breaks that contract and no other."""

from __future__ import annotations

import ast
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import nox.project
import pytest

from workspace import ROOT, Workspace

pytest.importorskip("importlinter", reason="import-linter needs Python 3.11")

CONFIGS = [ROOT / "pyproject.toml", ROOT / "tools" / "import_cycles.toml"]
SETTINGS = [nox.project.load_toml(config)["tool"]["importlinter"] for config in CONFIGS]
BY_NAME = {contract["name"]: contract for settings in SETTINGS for contract in settings["contracts"]}
CONTRACTS = list(BY_NAME)
MODULES = sorted(package.module for package in Workspace().packages.values())

LAYERS = "Imports run down the component graph"
CONFIG = "Only the orchestrator reads the configuration"
COLLECTIVES = "Only the facade imports the collectives"
TOOLS = "The core of the orchestrator never imports its tools"
BACKENDS = "Backends are found through entry points, never imported"
TESTING = "Test helpers stay out of the packages"
SHARED = "Only layers on torch import what they share"
UTILS = "comm_utils needs the standard library only"
TORCHLESS_CONFIG = "comm_config needs neither torch nor numpy"
CYCLES = "No cycles inside a package"

FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {}\n"

# Of comm_utils, what needs other packages.
ON_TORCH = ("testing", "torch_support")

Plant = tuple[str, Mapping[str, str]]


def plants() -> Iterator[Plant]:
    """A contract, and the files (relative to all ``src`` folders) that break it."""
    # Upwards, inside a function as well, and sideways.
    yield LAYERS, {"comm_collectives/planted.py": "import comm_orchestrator"}
    yield LAYERS, {"comm_backend_torch/planted.py": "import comm_orchestrator.facade"}
    yield LAYERS, {"comm_backend_ccl/planted.py": "def late():\n    import comm_orchestrator"}
    yield LAYERS, {"comm_config/planted.py": "import comm_utils"}
    yield CONFIG, {"comm_collectives/planted.py": "from comm_config import planted", "comm_config/planted.py": ""}
    yield CONFIG, {"comm_backend_torch/planted.py": "import comm_config"}
    yield COLLECTIVES, {"comm_orchestrator/planted.py": "import comm_collectives"}
    yield COLLECTIVES, {"comm_orchestrator/planted.py": "from comm_collectives import all_reduce"}
    yield TOOLS, {"comm_orchestrator/planted.py": "from comm_orchestrator.tools import local_ranks"}
    yield TOOLS, {"comm_orchestrator/planted.py": "def late():\n    import comm_orchestrator.tools.errors"}
    yield BACKENDS, {"comm_orchestrator/planted.py": "import comm_backend_torch"}
    yield BACKENDS, {"comm_orchestrator/planted.py": "import comm_backend_ccl"}
    yield TESTING, {"comm_backend_torch/planted.py": "from comm_utils.testing import run_ranks"}
    yield TESTING, {"comm_utils/planted.py": "import comm_utils.testing"}
    yield SHARED, {"comm_utils/planted.py": "import comm_utils.torch_support"}
    yield SHARED, {"comm_orchestrator/planted.py": "from comm_utils.torch_support import flattening"}
    for name in ("torch", "numpy", "pydantic", "pytest"):
        yield UTILS, {"comm_utils/planted.py": f"import {name}"}
    yield UTILS, {"comm_utils/planted.py": "def late():\n    import torch.distributed"}
    for name in ("torch", "numpy"):
        yield TORCHLESS_CONFIG, {"comm_config/planted.py": f"import {name}"}
    for module in MODULES:
        yield (
            CYCLES,
            {
                f"{module}/planted_a.py": f"import {module}.planted_b",
                f"{module}/planted_b.py": f"import {module}.planted_a",
            },
        )
        # For annotations alone, too.
        yield (
            CYCLES,
            {
                f"{module}/planted_a.py": f"import {module}.planted_b",
                f"{module}/planted_b.py": FOR_TYPES.format(f"import {module}.planted_a"),
            },
        )


Lint = Callable[[Mapping[str, str]], dict[str, str]]


@pytest.fixture
def lint(tmp_path: Path) -> Lint:
    """Plants files into a copy of the sources; returns each contract's name with KEPT or BROKEN."""

    def run(files: Mapping[str, str]) -> dict[str, str]:
        for package in Workspace().packages.values():
            source = package.folder / "src" / package.module
            shutil.copytree(source, tmp_path / package.module, ignore=shutil.ignore_patterns("__pycache__"))
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        linter = str(Path(sys.executable).with_name("lint-imports"))
        # A temporary folder of its own: with the sources at its top it is itself the path to import from. Packages that
        # are installed from the real sources are found by hooks, which -S leaves out.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *site.getsitepackages()]), "COLUMNS": "200"}
        results: dict[str, str] = {}
        for config in CONFIGS:
            command = [sys.executable, "-S", linter, "--no-cache", "--config", str(config)]
            done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
            found = dict(re.findall(r"^(.+) (KEPT|BROKEN)\b", done.stdout, re.MULTILINE))
            assert found, done.stdout + done.stderr
            assert done.returncode == ("BROKEN" in found.values())
            results |= found
        assert list(results) == CONTRACTS
        return results

    return run


def test_sources_keep_every_contract(lint: Lint) -> None:
    assert lint({}) == dict.fromkeys(CONTRACTS, "KEPT")


def quick_and_slow() -> Iterator[Any]:
    """Of each contract one plant is quick."""
    seen: set[str] = set()
    for contract, files in plants():
        yield pytest.param(contract, files, marks=[pytest.mark.slow] if contract in seen else [])
        seen.add(contract)


@pytest.mark.parametrize(
    ("contract", "files"),
    list(quick_and_slow()),
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_a_planted_violation_breaks_one_contract(lint: Lint, contract: str, files: Mapping[str, str]) -> None:
    assert lint(files) == dict.fromkeys(CONTRACTS, "KEPT") | {contract: "BROKEN"}


def test_annotations_may_name_what_is_forbidden(lint: Lint) -> None:
    assert lint({"comm_utils/planted.py": FOR_TYPES.format("import torch")}) == dict.fromkeys(CONTRACTS, "KEPT")


def test_every_contract_has_a_plant() -> None:
    assert {contract for contract, _ in plants()} == set(CONTRACTS)


def third_party(module: str) -> set[str]:
    """Return what a module of ``comm_utils`` imports beside the standard library, but for annotations."""
    tree = ast.parse(module)
    for_types = {
        id(one)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for part in node.body
        for one in ast.walk(part)
    }
    named: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named.add(node.module or "")
    return {name.partition(".")[0] for name in named} - sys.stdlib_module_names - {"comm_utils"}


def test_comm_utils_imports_the_standard_library_alone() -> None:
    """The contract can name some of all other packages only."""
    assert third_party("import psutil\nimport sys\nfrom rich.table import Table") == {"psutil", "rich"}
    assert third_party(FOR_TYPES.format("import torch")) == set()
    source = Workspace().packages["comm-utils"].folder / "src" / "comm_utils"
    modules = [path for path in source.rglob("*.py") if path.relative_to(source).parts[0] not in ON_TORCH]
    assert len(modules) > 50
    found = {str(path.relative_to(source)): third_party(path.read_text()) for path in modules}
    assert {name: names for name, names in found.items() if names} == {}


def test_contracts_cover_every_package() -> None:
    layers = [name.strip() for layer in BY_NAME[LAYERS]["layers"] for name in layer.split("|")]
    assert sorted(layers) == sorted(BY_NAME[CYCLES]["ancestors"]) == MODULES
    for settings in SETTINGS:
        assert sorted(settings["root_packages"]) == MODULES
