"""The pictures of docs/compression.md; the same numbers give the same files. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["plot_losses", "plot_times"]

# Okabe and Ito's colours, which people with any colour vision can tell apart.
_COLOURS = ("#000000", "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#8C6D1F", "#7F7F7F")
_MARKERS = "osD^vPX*h"


def plot_times(path: Path, times: Mapping[str, Mapping[float, float]], title: str) -> None:
    """Draw the time of a call against the speed of the link.

    Args:
        times: ms by Gbit/s, by codec.
    """

    def draw(axes: Any) -> None:
        for number, (name, by_speed) in enumerate(times.items()):
            speeds = sorted(by_speed)
            style = {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKERS[number % len(_MARKERS)]}
            axes.plot(speeds, [by_speed[one] for one in speeds], label=name, linewidth=1.2, markersize=4, **style)
        speeds = sorted({one for by_speed in times.values() for one in by_speed})
        axes.set(xscale="log", yscale="log", xlabel="speed of the link, Gbit/s", ylabel="time of a call, ms")
        axes.set_xticks(speeds, [f"{one:g}" for one in speeds], minor=False)
        axes.set_xticks([], minor=True)
        # Mantissas of minor ticks would overlap.
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda *_: "")
        axes.set_title(title)
        axes.legend(frameon=False, ncols=2, fontsize=8)

    _save(path, draw)


def plot_losses(path: Path, rows: Sequence[tuple[str, float, float]], title: str) -> None:
    """Draw the loss of a model against what a rank sent to train it.

    Args:
        rows: name, MiB and loss of each codec.
    """

    def draw(axes: Any) -> None:
        for number, (name, sent, loss) in enumerate(rows):
            style = {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKERS[number % len(_MARKERS)]}
            axes.plot([sent], [loss], linestyle="none", label=name, markersize=6, **style)
        axes.axhline(rows[0][2], color="0.6", linewidth=1, zorder=1)
        axes.set(xscale="log", xlabel="MiB that a rank sent", ylabel="loss")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_title(title)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))

    _save(path, draw)


def _save(path: Path, draw: Any) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.grid(True, color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        # When and with what a picture was made says nothing about its numbers.
        figure.savefig(path, metadata={"Date": None, "Creator": None})
