"""Draw pictures: their colours, and the one module that imports matplotlib."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comm_utils.atomic_write import replacing_binary
from comm_utils.errors import BackendUnavailableError

__all__ = [
    "BLACK",
    "BLUE",
    "GREEN",
    "ORANGE",
    "PURPLE",
    "SERIES",
    "SKY_BLUE",
    "VERMILION",
    "YELLOW",
    "draw",
    "library",
]

# Okabe and Ito, "Color Universal Design" (https://jfly.uni-koeln.de/color/): people with any colour vision can tell
# them apart.
BLACK, BLUE, GREEN, ORANGE = "#000000", "#0072B2", "#009E73", "#E69F00"
PURPLE, SKY_BLUE, VERMILION, YELLOW = "#CC79A7", "#56B4E9", "#D55E00", "#F0E442"
#: Colours of lines and points, of which the first are the easiest to see; black is for text.
SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY_BLUE, YELLOW)

# The same values give the same file, byte for byte: when and with what a picture was made is left out.
_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "comm", "font.size": 9, "font.family": "sans-serif"}
_LEFT_OUT = {"svg": ("Date", "Creator"), "pdf": ("CreationDate", "Creator", "Producer"), "png": ("Software",)}
_DOTS_PER_INCH = 150


def library(what: str) -> Any:
    """Matplotlib.

    Args:
        what: needs it, for the error.

    Raises:
        BackendUnavailableError: it is not installed.
    """
    try:
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise BackendUnavailableError(
            f"{what}: needs matplotlib; install it with: pip install 'comm-orchestrator[plot]'"
        ) from error


def draw(path: Path, size_inches: tuple[float, float], fill: Callable[[Any], None]) -> None:
    """Write the figure that ``fill`` has drawn to ``path``, which is unchanged if that fails.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
        ArgumentError: nothing can be written there.
        OSError: the file cannot be written to its end.
    """
    matplotlib, figures = library(str(path)), importlib.import_module("matplotlib.figure")
    kind = path.suffix.lower()[1:]
    # Of a name, matplotlib would make a file that it can also read, which a pipe is not.
    with matplotlib.rc_context(_SETTINGS), replacing_binary(path) as file, warnings.catch_warnings():
        # A name may have characters that the font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure = figures.Figure(figsize=size_inches, layout="constrained")
        fill(figure)
        figure.savefig(file, format=kind, dpi=_DOTS_PER_INCH, metadata=dict.fromkeys(_LEFT_OUT[kind]))
