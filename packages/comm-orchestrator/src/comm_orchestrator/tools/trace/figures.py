"""Draw figures: colours that are the same in all of them, and the one module that imports matplotlib."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comm_utils import operations
from comm_utils.atomic_write import replacing_binary
from comm_utils.errors import ArgumentError, BackendUnavailableError
from comm_utils.operations import patterns

__all__ = ["FAMILIES", "FORMATS", "OTHER", "WAIT", "check_format", "draw", "family", "library", "pale"]

# Okabe and Ito, "Color Universal Design" (https://jfly.uni-koeln.de/color/).
#: family of operations -> colour
FAMILIES = {
    patterns.ALL_REDUCE.family: "#0072B2",
    patterns.ALL_GATHER.family: "#009E73",
    patterns.REDUCE_SCATTER.family: "#E69F00",
    patterns.ALL_TO_ALL.family: "#D55E00",
    patterns.BROADCAST.family: "#CC79A7",
    patterns.REDUCE.family: "#F0E442",
    patterns.SEND.family: "#56B4E9",
    patterns.BARRIER.family: "#000000",
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
# The same trace gives the same file, byte for byte.
_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "comm", "font.size": 9, "font.family": "sans-serif"}
_DOTS_PER_INCH = 150


def check_format(path: Path) -> None:
    """Refuse a file whose name says nothing that can be drawn.

    Raises:
        ArgumentError: names what can be.
    """
    if path.suffix.lower() not in FORMATS:
        raise ArgumentError(f"{path}: got a name ending with {path.suffix!r}; expected {' or '.join(FORMATS)}")


def library() -> Any:
    """Matplotlib.

    Raises:
        BackendUnavailableError: it is not installed.
    """
    try:
        return importlib.import_module("matplotlib")
    except ImportError:
        raise BackendUnavailableError(
            "trace plot: needs matplotlib; install it with: pip install 'comm-orchestrator[plot]'"
        ) from None


def draw(path: Path, size_inches: tuple[float, float], fill: Callable[[Any], None]) -> None:
    """Write the figure that ``fill`` has drawn to ``path``.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
        ArgumentError: nothing can be written there.
    """
    matplotlib, figures = library(), importlib.import_module("matplotlib.figure")
    kind = path.suffix.lower()[1:]
    with matplotlib.rc_context(_SETTINGS), replacing_binary(path) as file:
        figure = figures.Figure(figsize=size_inches, layout="constrained")
        fill(figure)
        metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
        # Of a name, matplotlib would make a file that it can also read, which a pipe is not.
        with warnings.catch_warnings():
            # A name may have characters that the font lacks.
            warnings.filterwarnings("ignore", "Glyph .* missing from")
            figure.savefig(file, format=kind, dpi=_DOTS_PER_INCH, metadata=metadata)
