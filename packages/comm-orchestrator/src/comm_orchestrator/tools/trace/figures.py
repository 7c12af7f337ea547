"""The colours and the formats of a trace's figures."""

from __future__ import annotations

from pathlib import Path

from comm_orchestrator.tools import pictures
from comm_utils import operations
from comm_utils.errors import ArgumentError
from comm_utils.operations import patterns

__all__ = ["FAMILIES", "FORMATS", "OTHER", "WAIT", "check_format", "family", "pale"]

#: family of operations -> colour
FAMILIES = {
    patterns.ALL_REDUCE.family: pictures.BLUE,
    patterns.ALL_GATHER.family: pictures.GREEN,
    patterns.REDUCE_SCATTER.family: pictures.ORANGE,
    patterns.ALL_TO_ALL.family: pictures.VERMILION,
    patterns.BROADCAST.family: pictures.PURPLE,
    patterns.REDUCE.family: pictures.YELLOW,
    patterns.SEND.family: pictures.SKY_BLUE,
    patterns.BARRIER.family: pictures.BLACK,
}
#: a family that is not among them
OTHER = "#7A5195"
#: a wait for an asynchronous operation
WAIT = "#999999"


def family(operation: str) -> str:
    """Return which of :data:`FAMILIES` ``operation`` belongs to, or another family of a registered pattern."""
    return operations.get(operation).pattern.family


def pale(color: str) -> str:
    """``color``, mixed with twice as much white."""
    parts = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part * 0.34 + 255 * 0.66):02X}" for part in parts)


FORMATS = (".svg", ".png")


def check_format(path: Path) -> None:
    """Refuse a file whose name says nothing that can be drawn.

    Raises:
        ArgumentError: names what can be.
    """
    if path.suffix.lower() not in FORMATS:
        raise ArgumentError(f"{path}: got a name ending with {path.suffix!r}; expected {' or '.join(FORMATS)}")
