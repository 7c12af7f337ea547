"""Words to avoid, openings of docstrings and long lines are found with their place; code and names are left alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import check_words
from check_words import Rules
from workspace import ROOT

RULES = Rules(
    banned={re.compile(r"\b(?:short\s+way|landing)\b", re.IGNORECASE): "fast path"},
    openings=frozenset({"What", "Whether"}),
    width=40,
    paths=["*.md", "src/**/*.py"],
)
LONG = "word " * 10


def python(text: str) -> list[tuple[int, str]]:
    return [(problem.line, problem.text) for problem in check_words.check_python(Path("a.py"), text, RULES)]


def markdown(text: str) -> list[tuple[int, str]]:
    return [(problem.line, problem.text) for problem in check_words.check_markdown(Path("a.md"), text, RULES)]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a = 1\n# the short way\n", 2),
        ('raise ValueError("take the Short way")\n', 1),
        ('b = 2\nraise ValueError(f"the short way {b}")\n', 2),
        ('"""A module.\n\nIt takes the short\nway.\n"""\n', 3),
        ("a = 1\n\n# the short\n# way\n", 3),
        ('raise ValueError(\n    "take the short "\n    "way"\n)\n', 2),
        ('raise ValueError(\n    f"{b} takes the short "  # a comment\n    f"way of {b}"\n)\n', 2),
    ],
)
def test_banned_words_in_python(text: str, line: int) -> None:
    ((found, message),) = python(text)
    assert found == line
    assert "write fast path" in message


def test_names_are_not_words() -> None:
    assert python("landing = f'{landing} has {landing.size}'\n") == []
    assert python('short_way = {"short_way": 1}\n__all__ = ["short_way"]\n') == []


@pytest.mark.parametrize(
    "text",
    ['"""What it is."""\n', 'class A:\n    """Whether it is."""\n', 'def f():\n    """What is returned."""\n'],
)
def test_openings_of_docstrings(text: str) -> None:
    ((_, message),) = python(text)
    assert "begin with a verb" in message
    assert python(re.sub("What|Whether", "Return whether", text)) == []


def test_markdown_width() -> None:
    page = f"# Title\n\n{LONG}\n| {LONG} |\n```text\n{LONG}\n```\nshort https://example.org/{'x' * 60}\n"
    ((line, message),) = markdown(page)
    assert line == 3
    assert "expected at most 40" in message


def test_markdown_words() -> None:
    page = "`the short way`\n\n```text\nthe short way\n```\n\nthe short\nway\n"
    ((line, _),) = markdown(page)
    assert line == 7


def test_phrases_across_lines_of_a_quotation_and_of_a_list() -> None:
    assert [line for line, _ in markdown("> the short\n> way\n\n- the short\n  way\n")] == [1, 4]
    assert markdown("- it is short\n- way\n") == []


def test_main(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rules are read from ``pyproject.toml``, exempt files may use every word, and paths restrict the check."""
    (tmp_path / "pyproject.toml").write_text(
        "[tool.check_words]\n"
        'paths = ["*.md", "src/**/*.py"]\nexempt = ["glossary.md"]\nmarkdown_width = 40\n'
        'docstring_openings = ["What"]\n[tool.check_words.banned]\n\'short\\s+way\' = "fast path"\n'
    )
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text('"""What it does."""\n')
    (tmp_path / "glossary.md").write_text("the short way\n")
    (tmp_path / "page.md").write_text("good\n")
    assert check_words.main([], tmp_path) == 1
    output = capsys.readouterr().out
    assert output.splitlines() == [
        "src/a.py:1: docstring begins with 'What'; begin with a verb, such as 'Return'",
    ]
    assert check_words.main([str(tmp_path / "page.md"), str(tmp_path / "glossary.md")], tmp_path) == 0
    # A path that names no file is an error, not a success.
    assert check_words.main([str(tmp_path / "missing.md")], tmp_path) == 1


def test_glossary_lists_only_banned_words_that_are_checked() -> None:
    """Every rule of this repository catches a word of the glossary's list, so that the list shows all of them."""
    rules = Rules.load(ROOT)
    glossary = (ROOT / "docs/glossary.md").read_text()
    words = glossary[glossary.index("## Words to avoid") :]
    assert [pattern.pattern for pattern in rules.banned if not pattern.search(words)] == []
