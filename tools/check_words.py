"""Check the language of the sources and pages: words to avoid, openings of docstrings, the width of Markdown.

    python tools/check_words.py
    python tools/check_words.py README.md packages/comm-utils/src

Settings are in ``pyproject.toml`` under ``tool.check_words``. In Python files, comments and strings are checked; names
are not. In Markdown, everything outside of code blocks and inline code is checked. Phrases are found across the ends of
lines, also where these are quoted, or are comments or strings of their own.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Problem", "Rules", "check", "check_markdown", "check_python", "files", "main"]

ROOT = Path(__file__).resolve().parent.parent

FENCE = re.compile(r"^\s*```")
INLINE_CODE = re.compile(r"`[^`\n]*`")
URL = re.compile(r"<?https?://\S+|\]\([^)\s]*\)")
NAME = re.compile(r"[\w.\-/]*")
F_STRING = re.compile(r"[rR]?[fF]")
FIELD = re.compile(r"\{[^{}]*\}")
# The text of an f-string is a token of its own from Python 3.12 on.
STRING_TOKENS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
# Between strings that Python joins.
JOINING_TOKENS = {tokenize.NL, *(getattr(tokenize, name, tokenize.NL) for name in ("FSTRING_START", "FSTRING_END"))}
QUOTE = re.compile(r"^\s*>\s?")


@dataclass(frozen=True)
class Problem:
    """One line that does not follow the rules."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Rules:
    """The settings of ``tool.check_words``.

    Attributes:
        banned: a regular expression for each word to avoid, with what to write instead.
        openings: words that no docstring may begin with.
        width: columns of a line of Markdown that is neither a table nor code; URLs do not count.
        paths: glob patterns of the files to check, relative to the root of the repository.
        exempt: files that may use any word, such as the glossary; their width is checked all the same.
    """

    banned: Mapping[re.Pattern[str], str]
    openings: frozenset[str]
    width: int
    paths: Sequence[str]
    exempt: frozenset[Path] = frozenset()

    @classmethod
    def load(cls, root: Path) -> Rules:
        """Read the rules from ``pyproject.toml``."""
        table: Mapping[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["check_words"]
        return cls(
            banned={
                re.compile(rf"\b(?:{word})\b", re.IGNORECASE): instead for word, instead in table["banned"].items()
            },
            openings=frozenset(table["docstring_openings"]),
            width=table["markdown_width"],
            paths=table["paths"],
            exempt=frozenset(root / path for path in table["exempt"]),
        )


def banned_words(path: Path, line: int, text: str, rules: Rules) -> Iterator[Problem]:
    for pattern, instead in rules.banned.items():
        for match in pattern.finditer(text):
            number = line + text.count("\n", 0, match.start())
            found = " ".join(match[0].split())
            yield Problem(path, number, f"got {found!r}, expected plain technical English; write {instead}")


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the strings and comments of a Python file with their lines; those that follow each other as one."""
    for pattern in (STRING_TOKENS, {tokenize.COMMENT}):
        begin, end, parts = 0, 0, [""]
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in pattern:
                # Lines stay lines, so that the numbers are right.
                parts += ["\n" * (token.start[0] - end) if begin else "", _words_of(token)]
                begin, end = begin or token.start[0], token.end[0]
            elif token.type not in JOINING_TOKENS and token.type != tokenize.COMMENT and begin:
                yield begin, "".join(parts)
                begin, parts = 0, [""]


def _words_of(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.COMMENT:
        return token.string.lstrip("#")
    if token.type != tokenize.STRING:
        return token.string
    # Before Python 3.12, an f-string is one token, with the names of its fields.
    words = FIELD.sub("{}", token.string) if F_STRING.match(token.string) else token.string
    return words.lstrip("frbuFRBU").strip("\"'")


def check_python(path: Path, text: str, rules: Rules) -> Iterator[Problem]:
    """Check the comments, strings and docstrings of a Python file."""
    for line, words in texts(text):
        # A string that is one word is a name: of an attribute, an option or a key.
        if not NAME.fullmatch(words.replace("{}", "")):
            yield from banned_words(path, line, words, rules)
    for line, docstring in docstrings(ast.parse(text)):
        first = re.match(r"[A-Za-z]*", docstring)
        if first and first[0] in rules.openings:
            yield Problem(path, line, f"docstring begins with {first[0]!r}; begin with a verb, such as 'Return'")


def check_markdown(path: Path, text: str, rules: Rules, words: bool = True) -> Iterator[Problem]:
    """Check the prose of a Markdown page."""
    in_code = False
    prose = []
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line):
            in_code = not in_code
        elif not in_code:
            if len(URL.sub("", line)) > rules.width and not line.lstrip().startswith("|"):
                yield Problem(path, number, f"got {len(line)} columns, expected at most {rules.width}; break the line")
            prose.append(QUOTE.sub("", INLINE_CODE.sub("", line)))
            continue
        # Lines of code stay as empty lines, so that the numbers of lines are right.
        prose.append("")
    if words:
        yield from banned_words(path, 1, "\n".join(prose), rules)


def files(root: Path, patterns: Sequence[str]) -> Iterator[Path]:
    """Yield the files that the patterns name, once each."""
    found = {path for pattern in patterns for path in root.glob(pattern)}
    return (path for path in sorted(found) if not {".nox", ".venv", "__pycache__"} & set(path.parts))


def check(path: Path, rules: Rules) -> Iterator[Problem]:
    """Check one file."""
    text = path.read_text(encoding="utf-8")
    words = path not in rules.exempt
    if path.suffix == ".md":
        yield from check_markdown(path, text, rules, words)
    elif words:
        yield from check_python(path, text, rules)


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Print every problem; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders; default: those of pyproject.toml")
    given = [path.resolve() for path in parser.parse_args(argv).paths]
    rules = Rules.load(root)
    checked = [
        path
        for path in files(root, rules.paths)
        if not given or any(path == other or other in path.parents for other in given)
    ]
    problems = [problem for path in checked for problem in check(path, rules)]
    for problem in problems:
        print(Problem(problem.path.relative_to(root), problem.line, problem.text))
    print(f"{len(checked)} files, {len(problems)} problems", file=sys.stderr)
    return 1 if problems or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
