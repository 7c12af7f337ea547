"""The content of a timeline: bars in lanes, few enough to be visible and to fit into a small file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from comm_orchestrator.tools.trace.figures import family
from comm_utils.observability.traces import Event, RankTrace
from comm_utils.observability.traces.alignment import group_of
from comm_utils.observability.traces.labels import labels

__all__ = ["WAITING", "Bar", "Lane", "lanes", "thinned"]

#: The look of a wait for an asynchronous operation.
WAITING = "wait"
# Asynchronous operations that overlap get lanes of their own, up to so many; further ones share the last.
_MOST_OVERLAPPING = 4


@dataclass(frozen=True)
class Bar:
    """Something that lasted.

    Attributes:
        look: family of operations, or :data:`WAITING`.
        waiting: for other ranks, not transferring.
        height: the share of the lane's height; less than 1 where bars too narrow to be drawn filled only so much of the
            time.
    """

    begin_ns: int
    end_ns: int
    look: str
    waiting: bool = False
    height: float = 1.0

    def moved(self, by_ns: int) -> Bar:
        """Return the same, ``by_ns`` later."""
        return replace(self, begin_ns=self.begin_ns + by_ns, end_ns=self.end_ns + by_ns)


@dataclass
class Lane:
    """One row: of a rank, a group, or ``"messages"``.

    Attributes:
        half: for asynchronous operations: half as high.
    """

    rank: int
    track: str
    half: bool = False
    bars: list[Bar] = field(default_factory=list)


def lanes(
    traces: Sequence[RankTrace],
    shown: Iterable[int],
    begin_ns: int,
    end_ns: int,
    waited: Mapping[int, tuple[int, int]],
) -> list[Lane]:
    """Return the lanes of the ranks ``shown``, from above to below, with what happened from ``begin_ns`` to ``end_ns``.

    Args:
        waited: how long each event waited, by its ``id``, of which the first number counts.
    """
    names = labels(traces)
    order = {track: place for place, track in enumerate([*names.values(), "messages"])}
    found: list[Lane] = []
    wanted = set(shown)
    for trace in traces:
        if trace.rank not in wanted:
            continue
        tracks: dict[str, list[Event]] = defaultdict(list)
        for event in trace.events:
            track = "messages" if event.operation.pattern.is_message else names[group_of(event.operation)]
            tracks[track].append(event)
        for track in sorted(tracks, key=order.__getitem__) or ["world"]:
            found.extend(_of_track(trace.rank, track, tracks.get(track, []), waited))
    for lane in found:
        lane.bars = [clip for bar in lane.bars if (clip := _clipped(bar, begin_ns, end_ns)) is not None]
    return found


def _of_track(rank: int, track: str, events: Sequence[Event], waited: Mapping[int, tuple[int, int]]) -> list[Lane]:
    full = [event for event in events if not event.operation.asynchronous]
    half = [event for event in events if event.operation.asynchronous]
    rows = _rows(full) or [[]]
    found = [Lane(rank, track, bars=[bar for event in row for bar in _bars(event, waited)]) for row in rows]
    for event in half:
        found[0].bars.extend(Bar(wait.begin_ns, wait.end_ns, WAITING) for wait in event.waits)
    found[0].bars.sort(key=lambda bar: bar.begin_ns)
    for row in _rows(half):
        found.append(Lane(rank, track, half=True, bars=[bar for event in row for bar in _bars(event, waited)]))
    return found if full or any(event.waits for event in half) else found[1:] or found


def _rows(events: Sequence[Event]) -> list[list[Event]]:
    """``events`` in rows such that those of a row do not overlap, but in the last."""
    rows: list[list[Event]] = []
    busy: list[tuple[int, int]] = []  # until when, which row
    idle: list[int] = []
    for event in events:
        while busy and busy[0][0] <= event.begin_ns:
            heappush(idle, heappop(busy)[1])
        if not idle and len(rows) == _MOST_OVERLAPPING:
            rows[-1].append(event)
            continue
        if not idle:
            idle.append(len(rows))
            rows.append([])
        row = heappop(idle)
        rows[row].append(event)
        heappush(busy, (event.end_ns, row))
    return rows


def _bars(event: Event, waited: Mapping[int, tuple[int, int]]) -> list[Bar]:
    look = family(event.operation.operation)
    turn = event.begin_ns + waited.get(id(event), (0, 0))[0]
    found = [Bar(event.begin_ns, turn, look, waiting=True)] if turn > event.begin_ns else []
    return [*found, Bar(turn, event.end_ns, look)]


def _clipped(bar: Bar, begin_ns: int, end_ns: int) -> Bar | None:
    begin, end = max(bar.begin_ns, begin_ns), min(bar.end_ns, end_ns)
    if end < begin or bar.begin_ns >= end_ns:
        return None
    return Bar(begin, end, bar.look, bar.waiting, bar.height)


def thinned(bars: Sequence[Bar], begin_ns: int, end_ns: int, pixels: int) -> list[Bar]:
    """``bars`` of a lane, those narrower than a pixel drawn together.

    Pixels with nothing but narrow bars become bars that have the look of what fills most of them, and are as high as
    they are full, in quarters.

    Args:
        pixels: how many the time from ``begin_ns`` to ``end_ns`` gets.
    """
    step = max((end_ns - begin_ns) / pixels, 1.0)
    wide = [bar for bar in bars if bar.end_ns - bar.begin_ns >= step]
    filled: dict[int, dict[tuple[str, bool], float]] = defaultdict(lambda: defaultdict(float))
    for bar in bars:
        if bar.end_ns - bar.begin_ns < step:
            end = max(bar.end_ns - 1, bar.begin_ns)
            first, last = int((bar.begin_ns - begin_ns) / step), int((end - begin_ns) / step)
            for pixel in range(first, last + 1):  # two at most
                left, right = begin_ns + pixel * step, begin_ns + (pixel + 1) * step
                part = max(min(bar.end_ns, right) - max(bar.begin_ns, left), 0)
                filled[pixel][bar.look, bar.waiting] += max(part, 1)
    found: list[Bar] = []
    for pixel in sorted(filled):
        looks = filled[pixel]
        look, waiting = max(looks, key=lambda one: (looks[one], one))
        height = min(max(round(4 * sum(looks.values()) / step), 1), 4) / 4
        begin, end = round(begin_ns + pixel * step), round(begin_ns + (pixel + 1) * step)
        last_bar = found[-1] if found else None
        if (
            last_bar is not None
            and last_bar.end_ns == begin
            and (last_bar.look, last_bar.waiting, last_bar.height) == (look, waiting, height)
        ):
            found[-1] = Bar(last_bar.begin_ns, end, look, waiting, height)
        else:
            found.append(Bar(begin, end, look, waiting, height))
    # Wide ones above: the pixels that they share with narrow ones are theirs.
    return [*found, *wide]
