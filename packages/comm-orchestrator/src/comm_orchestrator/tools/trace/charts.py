"""Draw the two charts of a trace: the timeline of all ranks, and the bytes from rank to rank."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

from comm_orchestrator.tools.trace.figures import FAMILIES, OTHER, WAIT, pale
from comm_orchestrator.tools.trace.lanes import WAITING, Lane, thinned
from comm_utils.observability.traces.traffic import Traffic
from comm_utils.sizes import format_size

__all__ = ["draw_timeline", "draw_traffic", "height_inches", "side_inches"]

_MOST_BARS = 8000
_PIXELS = (250, 1500)
_HALF = 0.5
_GAP = 0.22  # between bars of neighbouring lanes, in lanes
_RANK_GAP = 0.35  # between ranks, in lanes
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_MOST_LABELS = 60


def height_inches(lanes: Sequence[Lane]) -> float:
    """Return how high the picture of ``lanes`` should be."""
    ranks = len({lane.rank for lane in lanes})
    total = sum(_HALF if lane.half else 1 for lane in lanes) + _RANK_GAP * ranks
    return 1.4 + total * min(0.32, max(0.06, 20 / max(total, 1)))


def draw_timeline(figure: Any, lanes: Sequence[Lane], begin_ns: int, end_ns: int, title: str) -> None:
    """Draw ``lanes`` from ``begin_ns`` to ``end_ns``, ns since the first call of the trace."""
    axes = figure.subplots()
    pixels = min(max(_MOST_BARS // max(len(lanes), 1), _PIXELS[0]), _PIXELS[1])
    scale, unit = next(one for one in _TIME_UNITS if (end_ns - begin_ns) * 1e-9 >= 2 * one[0] or one[1] == "ns")
    shown: dict[tuple[str, bool], list[tuple[float, float, float, float]]] = {}
    ticks: list[tuple[float, str]] = []
    bottom, previous, thin = 0.0, None, False
    for lane in lanes:
        if previous is not None and lane.rank != previous.rank:
            bottom += _RANK_GAP
            axes.axhline(bottom - _RANK_GAP / 2, color="#DDDDDD", linewidth=0.5)
        height = _HALF if lane.half else 1.0
        if previous is None or (lane.rank, lane.track, lane.half) != (previous.rank, previous.track, previous.half):
            ticks.append((bottom + height / 2, _label(lane, previous)))
        for bar in thinned(lane.bars, begin_ns, end_ns, pixels):
            full, thin = height * (1 - _GAP), thin or bar.height < 1
            left, right = (time * 1e-9 / scale for time in (bar.begin_ns, bar.end_ns))
            top = bottom + height * (1 - _GAP / 2) - full * bar.height
            shown.setdefault((bar.look, bar.waiting), []).append((left, top, right, top + full * bar.height))
        bottom, previous = bottom + height, lane
    _fill(axes, shown)
    axes.set_xlim(begin_ns * 1e-9 / scale, end_ns * 1e-9 / scale)
    axes.set_ylim(max(bottom, 1.0), 0)
    step = -(-len(ticks) // _MOST_LABELS)
    axes.set_yticks([place for place, _ in ticks[::step]], [text for _, text in ticks[::step]])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time since the first call ({unit})")
    axes.set_ylabel("rank and group")
    axes.set_title(title, loc="left", fontsize="medium", parse_math=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _legend(figure, shown, any(lane.half for lane in lanes), thin)


def _label(lane: Lane, previous: Lane | None) -> str:
    first = previous is None or previous.rank != lane.rank
    text = f"{lane.track}, async" if lane.half else lane.track
    return f"rank {lane.rank}  {text}" if first else text


def _color(look: str, waiting: bool) -> str:
    color = WAIT if look == WAITING else FAMILIES.get(look, OTHER)
    return pale(color) if waiting else color


def _fill(axes: Any, shown: dict[tuple[str, bool], list[tuple[float, float, float, float]]]) -> None:
    """All bars of one look are one shape: small files, quickly drawn."""
    paths: Any = importlib.import_module("matplotlib.path")
    patches: Any = importlib.import_module("matplotlib.patches")
    many = sum(map(len, shown.values())) > _MOST_BARS  # as an image, which is smaller then
    codes = [paths.Path.MOVETO, paths.Path.LINETO, paths.Path.LINETO, paths.Path.LINETO, paths.Path.CLOSEPOLY]
    for (look, waiting), boxes in sorted(shown.items(), key=lambda item: (not item[0][1], item[0])):
        corners = [
            corner
            for left, top, right, bottom in boxes
            for corner in ((left, top), (right, top), (right, bottom), (left, bottom), (left, top))
        ]
        path = paths.Path(corners, codes * len(boxes))
        color = _color(look, waiting)
        # A thin line of the same colour keeps bars visible that are narrower than a pixel of a smaller copy.
        axes.add_artist(patches.PathPatch(path, facecolor=color, edgecolor=color, linewidth=0.2, rasterized=many))


def _legend(figure: Any, shown: Iterable[tuple[str, bool]], asynchronous: bool, thin: bool) -> None:
    patches: Any = importlib.import_module("matplotlib.patches")
    looks = set(shown)
    entries = [(name, color) for name, color in FAMILIES.items() if {(name, False), (name, True)} & looks]
    handles = [patches.Patch(facecolor=color, label=name) for name, color in entries]
    if any(waiting for _, waiting in looks):
        handles.append(patches.Patch(facecolor=pale("#333333"), label="pale: waiting for other ranks"))
    if (WAITING, False) in looks:
        handles.append(patches.Patch(facecolor=WAIT, label="waiting for an asynchronous one"))
    if asynchronous:
        handles.append(patches.Patch(facecolor="white", edgecolor="#333333", label="half high: asynchronous"))
    if thin:
        handles.append(patches.Patch(facecolor="none", label="low: too short to draw, as high as they fill the time"))
    if handles:
        figure.legend(handles=handles, loc="outside lower left", ncols=5, frameon=False, fontsize="small")


_MOST_NUMBERS = 12
_MOST_TICKS = 32
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def side_inches(ranks: int) -> float:
    """Return how large the picture of so many ranks should be."""
    return min(max(2.6, 0.55 * ranks + 1.2), 8.0)


def draw_traffic(figure: Any, found: Traffic, ranks: Sequence[int], title: str, width_inches: float) -> None:
    """Draw what each of ``ranks`` sent to each other."""
    # The rest of the width stays empty, so that the colour bar is beside the map.
    share = min(side_inches(len(ranks)) * 1.25 / width_inches, 1.0)
    axes = figure.add_subplot(figure.add_gridspec(1, 2, width_ratios=[share, max(1 - share, 1e-3)])[0])
    table = [[found.bytes_sent[i][j] for j in ranks] for i in ranks]
    most = max(map(max, table))
    power = min((max(most, 1).bit_length() - 1) // 10, len(_BYTE_UNITS) - 1)
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
    axes.set_title(title, loc="left", fontsize="medium", parse_math=False)
    bar = figure.colorbar(mesh, ax=axes, shrink=0.85)
    bar.set_label(f"bytes sent ({_BYTE_UNITS[power]})")
