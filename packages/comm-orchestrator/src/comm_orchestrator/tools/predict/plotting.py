"""The picture of a fit: measured against fitted, and relative residuals against size."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comm_orchestrator.tools.pictures import SERIES, draw, library
from comm_utils.errors import ArgumentError
from comm_utils.sizes import format_size

if TYPE_CHECKING:
    from comm_utils.observability.cost_model import Fit, Model

__all__ = ["check_plot", "plot_residuals"]

_SUFFIXES = (".svg", ".png", ".pdf")
_MARKERS = "os^vDP*X"
# Sizes that are named below the picture of the residuals.
_MOST_TICKS = 6


def check_plot(path: Path) -> None:
    """Refuse before anything starts what could not be plotted in the end.

    Raises:
        ArgumentError: no picture has such a name.
        BackendUnavailableError: matplotlib is missing.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ArgumentError(f"--plot: got {str(path)!r}; expected a name that ends in {', '.join(_SUFFIXES)}")
    library("--plot")


def plot_residuals(model: Model, path: Path) -> None:
    """Draw ``model`` into ``path``; the same model gives the same file."""
    draw(path, (10, 4.6), partial(_fill, model))


def _fill(model: Model, figure: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    left, right = figure.subplots(1, 2)
    for number, fit in enumerate(model.fits):
        _points(left, right, fit, SERIES[number % len(SERIES)], _MARKERS[number // len(SERIES) % len(_MARKERS)])
    times = [value for fit in model.fits for one in fit.points for value in (one.measured_us, one.fitted_us) if value]
    span = (min(times), max(times))
    left.plot(span, span, color="0.4", linewidth=1, zorder=1)
    left.set(xscale="log", yscale="log", xlabel="fitted by the model, µs", ylabel="measured, µs")
    left.set_title("Measured against fitted")
    # With labels between them, those of a range of a decade or two overlap.
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if span[1] < 30 * span[0] else (1,)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}" if value < 10**6 else f"{value:.3g}"))
        axis.set_minor_formatter(NullFormatter())
    right.axhline(0, color="0.4", linewidth=1, zorder=1)
    right.set_xscale("symlog", base=2, linthresh=1)
    greatest = max(fit.sizes_bytes[1] for fit in model.fits)
    least = min((one.size_bytes for fit in model.fits for one in fit.points if one.size_bytes), default=1)
    ticks = _size_ticks(least, greatest)
    right.set_xticks(ticks, [format_size(at) for at in ticks], minor=False)
    if least < greatest:
        right.set_xlim(-0.5 if any(not fit.sizes_bytes[0] for fit in model.fits) else least / 2, 2 * greatest)
    right.set(xlabel="size", ylabel="(fitted - measured) / measured, %")
    right.set_title("Relative residuals")
    for axes in (left, right):
        axes.grid(True, color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.suptitle("A model: latency and bandwidth fitted to measurements", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)


def _size_ticks(least: int, greatest: int) -> list[int]:
    """Return powers of two between two sizes, evenly spaced and few enough to be named beside one another."""
    first, last = least.bit_length() - 1, max(greatest, 1).bit_length() - 1
    step = -(-(last - first + 1) // _MOST_TICKS)
    return [2**exponent for exponent in range(first, last + 1, step)]


def _points(left: Any, right: Any, fit: Fit, colour: str, marker: str) -> None:
    style = {"s": 14, "color": colour, "marker": marker, "linewidths": 0, "alpha": 0.85}
    shown = [one for one in fit.points if one.fitted_us > 0]
    left.scatter([one.fitted_us for one in shown], [one.measured_us for one in shown], label=str(fit.key), **style)
    residuals = [100 * (one.fitted_us - one.measured_us) / one.measured_us for one in fit.points]
    right.scatter([one.size_bytes for one in fit.points], residuals, **style)
