"""The classes that decisions and the page on the architecture name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs" / "decisions").glob("*.md")), ROOT / "docs" / "architecture.md"]
FOLDERS = ("packages", "tests-integration", "benchmarks", "tools")
#: What is not in this repository, by the page that names it.
ELSEWHERE = {
    ("025-plain-tensors-skip-the-dispatcher.md", "ExecutionTraceObserver"): "of torch.profiler",
    ("025-plain-tensors-skip-the-dispatcher.md", "TensorImpl"): "of torch, in C++",
}


@pytest.fixture(scope="module")
def words() -> set[str]:
    """Return the words of the sources, without comments that are lines of their own."""
    found: set[str] = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".hpp") and ".oneccl" not in path.parts:
                found.update(re.findall(r"\w+", re.sub(r"(?m)^\s*(#|//).*", "", path.read_text(encoding="utf-8"))))
    return found


def classes(page: Path) -> set[str]:
    """Return the names between backticks that look like those of classes."""
    quoted = " ".join(re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")))
    return set(re.findall(r"\b[A-Z][a-z]\w*\b", quoted))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_classes_exist(page: Path, words: set[str]) -> None:
    assert [name for name in sorted(classes(page)) if name not in words and (page.name, name) not in ELSEWHERE] == []


def test_what_is_elsewhere_is_named() -> None:
    named = {(page.name, name) for page in PAGES for name in classes(page)}
    assert ELSEWHERE.keys() <= named
