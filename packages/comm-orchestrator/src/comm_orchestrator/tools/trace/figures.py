"""Pictures: the one module that imports matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comm_orchestrator.tools.trace.output import replaced
from comm_utils.errors import ArgumentError, BackendUnavailableError

__all__ = ["FORMATS", "check_format", "draw", "library"]

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
    """matplotlib.

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
    with matplotlib.rc_context(_SETTINGS), replaced(path) as place:
        figure = figures.Figure(figsize=size_inches, layout="constrained")
        fill(figure)
        metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
        figure.savefig(place, format=kind, dpi=_DOTS_PER_INCH, metadata=metadata)
