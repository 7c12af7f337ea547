"""Names of operations outside their table are found wherever a table, a comparison or a match holds them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import check_operation_names as tool

NAMES = {"all_reduce", "barrier", tool.PROBE}


def found(source: str) -> list[tuple[int, str, str]]:
    return list(tool.names_in(ast.parse(source), NAMES))


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("x = {'all_reduce': 1}", "a dict"),
        ("x = {1: 'all_reduce'}", "a dict"),
        ("x = dict(all_reduce=1)", "a dict"),
        ("x = dict.fromkeys(('all_reduce',))", "a tuple"),
        ("x = frozenset({'all_reduce'})", "a set"),
        ("x = ['all_reduce']", "a list"),
        ("x = y == 'all_reduce'", "a comparison"),
        ("x = 'all_reduce' != y", "a comparison"),
        ("x = y in ('all_reduce', z)", "a tuple"),
        ("match y:\n    case 'all_reduce' | 'other':\n        pass", "a match"),
        ("match y:\n    case table.all_reduce:\n        pass", "a match"),
        ("x = y is table.all_reduce", "a comparison"),
        ("x = table.all_reduce != y", "a comparison"),
        ("TABLE['all_reduce'] = 1", "an entry of a table"),
        ("TABLE['all_reduce'] += 1", "an entry of a table"),
        ("TABLE.setdefault('all_reduce', 1)", "an entry of a table"),
        ("x = frozenset('all_reduce others'.split())", "a string that is split"),
        ("x = 'others, all_reduce'.split(',')", "a string that is split"),
    ],
)
def test_names_are_found(source: str, where: str) -> None:
    ((_, name, place),) = found(source)
    assert (name, place) == ("all_reduce", where)


@pytest.mark.parametrize(
    "source",
    [
        "__all__ = ['all_reduce']",
        "dist.all_reduce(x)",
        "raise ValueError('all_reduce')",
        "x = {'all_reduces': 1}",
        "def f():\n    'all_reduce'",
        "x = operations.get('all_reduce')",
        "x = {1: backend.all_reduce}",
        "x = table['all_reduce']",
        "x = 'all_reduces others'.split()",
        "x = y.split('all_reduce')",
    ],
)
def test_other_uses_are_left_alone(source: str) -> None:
    assert found(source) == []


def write(packages: Path, module: str, source: str) -> None:
    path = packages / "package" / "src" / module
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


def test_places_are_told_and_allowed_ones_are_not(tmp_path: Path) -> None:
    for allowed in tool.ALLOWED:
        write(tmp_path, allowed if allowed.endswith(".py") else f"{allowed}/module.py", "X = {'all_reduce': 1}\n")
    assert tool.check(tmp_path, NAMES, {}) == []
    write(tmp_path, "comm_utils/sizes.py", "\nX = {'all_reduce': 1}\n")
    (problem,) = tool.check(tmp_path, NAMES, {})
    assert problem.startswith("packages/package/src/comm_utils/sizes.py:2: a dict names the operation 'all_reduce'")
    assert tool.check(tmp_path, NAMES, {("comm_utils/sizes.py", "all_reduce"): "why"}) == []


def test_exceptions_are_used_and_few(tmp_path: Path) -> None:
    (problem,) = tool.check(tmp_path, NAMES, {("comm_utils/sizes.py", "all_reduce"): "why"})
    assert "does not name 'all_reduce'" in problem
    many = {(f"comm_utils/m{number}.py", "barrier"): "why" for number in range(tool.MOST_EXCEPTIONS + 1)}
    for module, _ in many:
        write(tmp_path, module, "X = y == 'barrier'\n")
    (problem,) = tool.check(tmp_path, NAMES, many)
    assert "got 11; expected at most 10" in problem


def test_one_operation_stands_in_few_files(tmp_path: Path) -> None:
    source = f"call = backend.{tool.PROBE}\n"
    for place in tool.UNCOUNTED:
        write(tmp_path, place if place.endswith(".py") else f"{place}/module.py", source)
    for number in range(tool.MOST_FILES):
        folder = "comm_utils" if number % 2 else "comm_collectives/reduction"
        write(tmp_path, f"{folder}/m{number}.py", source)
    assert tool.check(tmp_path, NAMES, {}) == []
    write(tmp_path, "comm_utils/one_more.py", f'"""As of {tool.PROBE}."""\n')
    (problem,) = tool.check(tmp_path, NAMES, {})
    assert problem.startswith(f"{tool.PROBE} stands in 13 files; expected at most 12")


def test_places_that_are_gone_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tool.check_places(tool.ROOT / "packages") == []
    monkeypatch.setattr(tool, "ALLOWED", {"comm_utils/backend.py": "there", "comm_utils/gone.py": "why"})
    assert tool.check_places(tool.ROOT / "packages") == ["ALLOWED: comm_utils/gone.py is not there; remove the line"]


def test_the_packages_pass() -> None:
    from comm_utils import operations

    assert len(tool.EXCEPTIONS) <= tool.MOST_EXCEPTIONS
    assert tool.check(tool.ROOT / "packages", {row.name for row in operations.rows()}) == []
