"""Make the help of commands fit the width of the terminal."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

__all__ = ["Commands", "unwrapped"]

# The mark of click for a paragraph whose lines stay as they are, such as a list of examples.
_KEEP = "\b"


class Commands(TyperGroup):
    """Commands whose help has each paragraph in one line, which the terminal's width divides.

    typer does so with the first paragraph only, and keeps the docstring's line breaks in the others.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # releases of typer have different click
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.help:
            command.help = unwrapped(command.help)
        return command


def unwrapped(text: str) -> str:
    """Return ``text`` with each paragraph in one line, but for those that begin with click's mark."""
    return "\n\n".join(one if one.startswith(_KEEP) else one.replace("\n", " ") for one in text.split("\n\n"))
