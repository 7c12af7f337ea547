"""Fenced code blocks of Markdown pages, and what their info strings ask for.

```` ```python ````                a program of its own, run in a fresh process
```` ```python continues ````      the previous Python block of the page goes on: both are one program
```` ```python file=train.py ````  likewise, and there for the commands of the page under that name
```` ```python ranks=4 ````        run on four ranks; the output is that of rank 0, then of rank 1, and so on
```` ```python needs=deepspeed ````  run where that package is installed: nox -s ecosystem
```` ```python patched ````        run by test_patches.py, on sources with the patch above it
```` ```json ````                  a configuration, which has to load
```` ```json file=comm.json ````   likewise, and there for the other blocks of the page under that name
```` ```toml file=pyproject.toml ````  the metadata of what the page shows: its entry points are there for the blocks
```` ```json data ````             any JSON
```` ```bash ````, ```` ```sh ````        commands, one a line
```` ```console ````               commands after ``$``, and what they print
```` ```diff ````                  a patch of this repository
```` ```text ````                  directly below a program or commands: what they print; ``...`` stands for anything
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Block", "blocks", "programs"]

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<info>[^`\n]*)$")
WORDS = {
    "python": {"continues", "file", "needs", "patched", "ranks"},
    "json": {"data", "file"},
    "bash": set(),
    "sh": set(),
    "console": set(),
    # Shown, not executed; test_patches.py applies patches.
    "diff": set(),
    "text": set(),
    "toml": {"file"},
    "mermaid": set(),
}


@dataclass
class Block:
    """One fenced block; ``output`` is the text block directly below it."""

    page: Path
    line: int
    language: str
    options: dict[str, str] = field(default_factory=dict)
    text: str = ""
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All blocks of a page.

    Raises:
        ValueError: a block without a language, or with one, or an option, that nothing here knows how to check.
    """
    found: list[Block] = []
    current: Block | None = None
    closing = indent = ""
    only_blank_since = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if current is not None:
            if line.strip() == closing:
                if current.language == "text" and only_blank_since:
                    found[-1].output = current.text
                else:
                    found.append(current)
                current, only_blank_since = None, True
            else:
                current.text += line.removeprefix(indent) + "\n"
        elif fence := FENCE.match(line):
            current = parse_info(page, number, fence["info"])
            closing, indent = fence["ticks"], fence["indent"]
        elif line.strip():
            only_blank_since = False
    return found


def parse_info(page: Path, line: int, info: str) -> Block:
    language, *words = info.split() or [""]
    if language not in WORDS:
        raise ValueError(f"{page}:{line}: got a block of {language!r}, expected one of {', '.join(WORDS)}")
    options = dict(word.partition("=")[::2] for word in words)
    if unknown := set(options) - WORDS[language]:
        raise ValueError(f"{page}:{line}: a block of {language} has no option {', '.join(sorted(unknown))}")
    return Block(page, line, language, options)


def programs(page: Path) -> Iterator[Block]:
    """The Python blocks of a page, each with those that continue it."""
    program: Block | None = None
    for block in blocks(page):
        if block.language != "python":
            continue
        if "continues" in block.options and program is not None:
            program.text += block.text
            if block.output is not None:
                program.output = (program.output or "") + block.output
            continue
        if program is not None:
            yield program
        program = block
    if program is not None:
        yield program
