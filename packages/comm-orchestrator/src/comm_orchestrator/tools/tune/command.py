"""Run ``commctl tune``: start the ranks, then show what they measured."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from comm_orchestrator import facade
from comm_orchestrator.tools import local_ranks
from comm_utils import kernels
from comm_utils.sizes import format_size

__all__ = ["default_ranks", "run"]

_MOST_BY_DEFAULT = 8
# Of two methods of one column, the faster one is shown.
_COLUMNS = {
    "cached": "cached",
    "cached, by all": "cached*",
    "cached, by all, small chunks": "cached*",
    "cached, small chunks": "cached+",
    "cached, wide ring": "wide",
    "cached, near ring": "near",
    "cached, by all, near ring": "near",
    "streamed": "streamed",
    "streamed, by all": "streamed",
    "streamed, by all, small chunks": "streamed",
    "streamed, small chunks": "streamed",
    "single_copy": "single",
}
_LEGEND = (
    "Medians in µs, by operation and least size of a class; groups begin with the least of a line. *: all ranks "
    "that get the result reduce everything; +: in small chunks; wide, near: cached, in the wide or the near ring; "
    "single: single_copy."
)


def default_ranks() -> list[int]:
    """Return the numbers of ranks that are measured unless others are asked for: a pair, and one for each core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return sorted({2, max(2, min(cores, _MOST_BY_DEFAULT))})


def run(ranks: Sequence[int], only_show: bool, as_json: bool) -> int:
    """Return the exit code: 0, 1 for a failure, 2 where this host has no shared memory for ranks."""
    found = facade.available_backends().get("ccl")
    profile = kernels.transfer_profile()
    if found is None or profile is None or "profile of transfers" not in found.details:
        why = "comm-backend-ccl is not installed" if found is None else found.details.get("shared memory", found.reason)
        print(f"error: ranks of this host do not share memory: {why}", file=sys.stderr)
        return 2
    if profile["file"] is None:
        print(
            "error: got CCL_SHARED_MEMORY_PROFILE=0, by which no profile is kept; unset it, or give a file",
            file=sys.stderr,
        )
        return 2
    if not only_show and profile["obstacle"]:
        print(f"error: what is measured could not be kept: {profile['obstacle']}", file=sys.stderr)
        return 2
    for number in () if only_show else ranks:
        code = local_ranks.run("comm_orchestrator.tools.tune.rank", [], number)
        if code:
            return 1 if code == local_ranks.FAILED else code
    profile = kernels.transfer_profile() or profile
    if as_json:
        shown = {number: {**one, "rows": [_as_dict(row) for row in one["rows"]]} for number, one in _ranks(profile)}
        print(json.dumps({**profile, "ranks": shown}, indent=2))
    else:
        _show(profile, ranks if not only_show else None)
    return 0


def _ranks(profile: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return sorted(profile["ranks"].items(), key=lambda item: int(item[0]))


def _as_dict(row: Any) -> dict[str, Any]:
    found: dict[str, Any] = row._asdict()
    return found


def _show(profile: Mapping[str, Any], ranks: Sequence[int] | None) -> None:
    console = Console()
    console.print(f"profile: {profile['file']}", soft_wrap=True, highlight=False, markup=False)
    for name, value in profile["machine"].items():
        console.print(f"{name}: {value}", soft_wrap=True, highlight=False, markup=False)
    shown = [(number, one) for number, one in _ranks(profile) if ranks is None or int(number) in ranks]
    if not shown:
        console.print("nothing was measured yet")
    for number, one in shown:
        for narrow in sorted({row.narrow for row in one["rows"]}):
            floats = ", 16-bit floats" if narrow else ""
            title = f"\n{number} ranks{floats}, measured {one['measured']} by {one['by']}"
            console.print(title, highlight=False, markup=False)
            console.print(_table([row for row in one["rows"] if row.narrow == narrow]))
    if shown:
        console.print(f"\n{_LEGEND}", highlight=False)


def _table(rows: Sequence[Any]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("operation", no_wrap=True)
    columns = tuple(dict.fromkeys((*_COLUMNS.values(), *(row.method for row in rows if row.method not in _COLUMNS))))
    for name in ("from", *columns):
        table.add_column(name, justify="right", no_wrap=True)
    kinds = sorted(rows, key=lambda row: (row.operation, row.least_bytes, row.eager))
    for (operation, least_bytes, _, _), group in groupby(kinds, lambda row: tuple(row[:4])):
        times: dict[str, float] = {}
        for row in group:
            column = _COLUMNS.get(row.method, row.method)
            times[column] = min(times.get(column, math.inf), row.ns / 1000)
        cells = [
            f"{times[one]:.4g}" if one in times and times[one] < 1e4 else _whole(times.get(one)) for one in columns
        ]
        table.add_row(escape(operation), format_size(least_bytes), *cells)
    return table


def _whole(us: float | None) -> str:
    return "" if us is None else f"{us:.0f}"
