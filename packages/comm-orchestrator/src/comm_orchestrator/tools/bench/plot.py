"""Latency and bus bandwidth against message size, as a picture."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from comm_orchestrator.tools.pictures import SERIES, draw

__all__ = ["SUFFIXES", "Point", "is_available", "plot"]

SUFFIXES = (".png", ".svg")
_MARKERS = "os^DvP*X"
_STYLES = {"in_place": "-", "out_of_place": "--"}


class Point(Protocol):
    """The fields that plots read of a :class:`comm_utils.observability.bench_results.BenchResult`."""

    @property
    def operation(self) -> str: ...
    @property
    def library(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def codec(self) -> str: ...
    @property
    def way(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def root(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def time_us(self) -> float: ...
    @property
    def rounds_us(self) -> Sequence[float]: ...
    @property
    def busbw_gb_per_s(self) -> float: ...


def is_available() -> bool:
    """Return whether matplotlib can be imported; does not import it."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(results: Sequence[Point], path: str, title: str = "") -> None:
    """Draw two panels for each operation, a line for each library and way; the same results give the same SVG.

    Results without a size, such as those of ``barrier``, are left out.

    Raises:
        ArgumentError: nothing can be written there.
        OSError: it cannot be written to its end.
        ValueError: nothing is left.
    """
    sized = [one for one in results if one.size_bytes > 0 and one.time_us > 0]
    operations = list(dict.fromkeys(one.operation for one in sized))
    if not operations:
        raise ValueError("got no result with a size; expected at least one")

    def fill(figure: Any) -> None:
        panels = figure.subplots(len(operations), 2, squeeze=False)
        for (latency, speed), operation in zip(panels, operations, strict=True):
            _panels(latency, speed, operation, [one for one in sized if one.operation == operation])
        if title:
            figure.suptitle(title, fontsize=10)

    draw(Path(path), (10, 0.6 + 3.4 * len(operations)), fill)


def _panels(latency: Any, speed: Any, operation: str, results: Sequence[Point]) -> None:
    lines: dict[tuple[Any, ...], list[Point]] = {}
    for one in results:
        parts = (one.library, one.backend, one.way, one.dtype, one.op, one.root, one.world_size, one.codec)
        lines.setdefault(parts, []).append(one)
    told = [number for number in range(8) if number < 2 or len({key[number] for key in lines}) > 1]
    looks = list(dict.fromkeys((*key[:2], *key[3:]) for key in lines))
    for key, points in lines.items():
        points = sorted(points, key=lambda one: one.size_bytes)
        number = looks.index((*key[:2], *key[3:]))
        style = {
            "color": SERIES[number % len(SERIES)],
            "marker": _MARKERS[number % len(_MARKERS)],
            "linestyle": _STYLES.get(key[2], "-"),
            "label": _label([key[part] for part in told]),
            "markersize": 3.5,
            "linewidth": 1.2,
        }
        sizes = [one.size_bytes for one in points]
        latency.plot(sizes, [one.time_us for one in points], **style)
        latency.fill_between(
            sizes,
            [min(one.rounds_us) for one in points],
            [max(one.rounds_us) for one in points],
            color=style["color"],
            alpha=0.15,
            linewidth=0,
        )
        fast = [(one.size_bytes, one.busbw_gb_per_s) for one in points if one.busbw_gb_per_s > 0]
        if fast:
            speed.plot(*zip(*fast, strict=True), **style)
    world_sizes = sorted({one.world_size for one in results})
    ranks = f"{operation}, {' and '.join(map(str, world_sizes))} ranks"
    sizes = sorted({one.size_bytes for one in results})
    for axes, what in ((latency, "time per call (µs)"), (speed, "bus bandwidth (GB/s)")):
        axes.set(title=ranks, xlabel="size (bytes)", ylabel=what)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(*_ticks(sizes))
        axes.xaxis.set_minor_locator(importlib.import_module("matplotlib.ticker").NullLocator())
        axes.grid(True, which="major", linewidth=0.4, alpha=0.6)
        if axes.lines:
            axes.legend(fontsize=7, frameon=False)


def _label(parts: Sequence[Any]) -> str:
    library, backend, *others = parts
    words = [f"root {one}" if isinstance(one, int) else one.replace("_", " ") for one in others if one != ""]
    return " ".join([f"{library}/{backend}", *words])


def _ticks(sizes: Sequence[int]) -> tuple[list[int], list[str]]:
    """Powers of two, ten of them at most, as people write sizes."""
    first, last = (sizes[0] - 1).bit_length(), sizes[-1].bit_length() - 1
    if last < first:
        return [sizes[0]], [_size(sizes[0])]
    step = max(1, -(-(last - first + 1) // 10))
    ticks = [2**exponent for exponent in range(first, last + 1, step)]
    return ticks, [_size(one) for one in ticks]


def _size(size_bytes: float) -> str:
    for unit in ("", "K", "M"):
        if size_bytes < 1024:
            return f"{size_bytes:g}{unit}"
        size_bytes /= 1024
    return f"{size_bytes:g}G"
