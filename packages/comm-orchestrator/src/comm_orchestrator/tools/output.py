"""Make what commands print fit for every terminal."""

from __future__ import annotations

import io
import sys

__all__ = ["accept_any_text", "printable"]


def accept_any_text() -> None:
    """Let stdout show a ``?`` for characters that its encoding lacks, such as ``±`` in ASCII."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def printable(text: str, lines: bool = False) -> str:
    """Return text of a file or of another process with escapes for what terminals take as commands.

    Args:
        lines: the text may have several lines; elsewhere a line feed is an escape too.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or (lines and one == "\n") else one.encode("unicode_escape").decode() for one in text
    )
