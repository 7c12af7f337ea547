"""The picture of bytes from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comm_utils.observability.traces.traffic import Traffic
from comm_utils.sizes import format_size

__all__ = ["draw_traffic", "side_inches"]

_MOST_NUMBERS = 12
_MOST_TICKS = 32
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def side_inches(ranks: int) -> float:
    """How large the picture of so many ranks should be."""
    return min(max(2.6, 0.55 * ranks + 1.2), 8.0)


def draw_traffic(figure: Any, found: Traffic, ranks: Sequence[int], title: str, width_inches: float) -> None:
    """Draw what each of ``ranks`` sent to each other."""
    # The rest of the width stays empty, so that the colour bar is beside the map.
    share = min(side_inches(len(ranks)) * 1.25 / width_inches, 1.0)
    axes = figure.add_subplot(figure.add_gridspec(1, 2, width_ratios=[share, max(1 - share, 1e-3)])[0])
    table = [[found.bytes_sent[i][j] for j in ranks] for i in ranks]
    most = max(map(max, table))
    power = min((max(most, 1).bit_length() - 1) // 10, len(_UNITS) - 1)
    scaled = [[size / 1024**power for size in row] for row in table]
    W = len(ranks)
    edges = [place - 0.5 for place in range(W + 1)]
    mesh = axes.pcolormesh(
        edges, edges, scaled, cmap="Blues", vmin=0, vmax=max(most / 1024**power, 1e-9), rasterized=W > _MOST_TICKS
    )
    axes.set_aspect("equal")
    axes.invert_yaxis()
    if W <= _MOST_NUMBERS:
        for i, row in enumerate(table):
            for j, size in enumerate(row):
                color = "white" if size > 0.6 * most else "black"
                text = format_size(size).replace(" ", "\n") if size else "0"
                axes.text(j, i, text if i != j else "", ha="center", va="center", fontsize=7, color=color)
    step = -(-W // _MOST_TICKS)
    places = range(0, W, step)
    axes.set_xticks(places, [str(ranks[place]) for place in places])
    axes.set_yticks(places, [str(ranks[place]) for place in places])
    axes.tick_params(length=0)
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.set_title(title, loc="left", fontsize="medium")
    bar = figure.colorbar(mesh, ax=axes, shrink=0.85)
    bar.set_label(f"bytes sent ({_UNITS[power]})")
