"""Prints a marked command block of README.md, so that what CI runs is what the README says.

In the README, ``<!-- command: tests -->`` stands on a line of its own above a fenced block; then
``bash -c "$(python3 tools/readme_command.py tests)"`` runs it. Needs the standard library alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(
    r"^<!-- command: (?P<name>[\w-]+) -->\n+```(?:bash|sh|shell)\n(?P<commands>.*?)^```$", re.MULTILINE | re.DOTALL
)


def commands(text: str) -> dict[str, str]:
    return {match["name"]: match["commands"] for match in BLOCK.finditer(text)}


def main() -> int:
    blocks = commands(README.read_text())
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    if name not in blocks:
        print(f"got {name!r}, expected a command that README.md marks: {', '.join(blocks) or 'none'}", file=sys.stderr)
        return 2
    print(blocks[name], end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
