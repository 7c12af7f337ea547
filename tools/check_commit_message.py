"""Check a commit message; usable as the Git hook ``commit-msg``.

    python tools/check_commit_message.py .git/COMMIT_EDITMSG

The subject has at most 72 characters and no full stop at its end, and an empty line separates it from the body.
Subjects that Git writes itself (merges, reverts, fixups) may have any length. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["main", "problems"]

SUBJECT_CHARACTERS = 72
WRITTEN_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
# Below this line, `git commit --verbose` shows the changes.
SCISSORS = "# ------------------------ >8 ------------------------"


def problems(message: str) -> Iterator[str]:
    """Yield what is wrong with a message, as Git passes it to the hook."""
    text = message.split(SCISSORS)[0]
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("#")]
    while lines and not lines[0]:
        del lines[0]
    if not lines:
        yield "got an empty message, expected a subject that says what the project does now"
        return
    subject = lines[0]
    if subject.startswith(WRITTEN_BY_GIT):
        return
    if len(subject) > SUBJECT_CHARACTERS:
        yield (
            f"got a subject of {len(subject)} characters, expected at most {SUBJECT_CHARACTERS}; "
            f"move the details into the body: {subject!r}"
        )
    if subject.endswith("."):
        yield f"got a full stop at the end of the subject, expected none: {subject!r}"
    if len(lines) > 1 and lines[1]:
        yield f"got text in the second line, expected an empty line below the subject: {lines[1]!r}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print every problem; return 1 if there is one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="the file with the message, which Git passes to the hook")
    found = list(problems(parser.parse_args(argv).file.read_text(encoding="utf-8")))
    for problem in found:
        print(f"commit message: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
