"""Labels of groups for people."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from comm_utils.observability.traces.alignment import Group, group_of
from comm_utils.observability.traces.events import RankTrace

__all__ = ["labels", "shortened"]

_MOST_RANKS = 8


def labels(traces: Iterable[RankTrace]) -> dict[Group, str]:
    """Return a label for each group in ``traces``: ``"world"`` first, ``"group [0, 2]"``; all different."""
    traces = list(traces)
    used = {event.operation for trace in traces for event in trace.events}
    world = tuple(range(max((trace.world_size for trace in traces), default=0)))
    groups = sorted(
        {group_of(operation) for operation in used}, key=lambda group: (group[1] != world, group[1], group[0])
    )
    found: dict[Group, str] = {}
    taken: set[str] = set()
    for group in groups:
        label = plain = "world" if group[1] == world else f"group {shortened(group[1])}"
        number = 1
        while label in taken:
            number += 1
            label = f"{plain} ({number})"
        taken.add(label)
        found[group] = label
    return found


def shortened(ranks: tuple[int, ...]) -> str:
    """``"[0, 2]"``; of more than eight ranks ``"[0, 2 ... 62]"`` where the steps are even, else the first six, too."""
    if len(ranks) <= _MOST_RANKS:
        return str(list(ranks))
    even = len({after - before for before, after in pairwise(ranks)}) == 1
    first = ", ".join(map(str, ranks[: 2 if even else 6]))
    return f"[{first}{'' if even else ','} ... {ranks[-1]}]"
