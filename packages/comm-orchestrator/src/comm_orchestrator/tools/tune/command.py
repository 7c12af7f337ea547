"""Run ``commctl tune``: start the ranks, then show what they measured."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from comm_orchestrator import facade
from comm_orchestrator.tools import local_ranks
from comm_orchestrator.tools.output import printable
from comm_utils import kernels
from comm_utils.sizes import format_size

__all__ = ["default_ranks", "run"]

_MOST_BY_DEFAULT = 8
_LEGEND = (
    "Each line is for sizes from the given one up to twice as much. Times are medians, in µs. "
    "In parentheses: how the method differs from the plain one; see the page on shared memory."
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
    if not only_show and profile["unavailable_reason"]:
        print(f"error: what is measured could not be kept: {profile['unavailable_reason']}", file=sys.stderr)
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
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("operation", max_width=len("reduce_scatter"))
    table.add_column("from size", justify="right", no_wrap=True)
    table.add_column("fastest", max_width=len("cached (by all,"))
    table.add_column("time, µs", justify="right", no_wrap=True)
    table.add_column("others, µs")
    both = {(row.operation, row.least_bytes) for row in rows if row.eager}
    both &= {(row.operation, row.least_bytes) for row in rows if not row.eager}
    kinds = sorted(rows, key=lambda row: (row.operation, row.least_bytes, row.eager))
    before = ""
    for (operation, least_bytes, _, eager), group in groupby(kinds, lambda row: tuple(row[:4])):
        (fastest, ns), *others = sorted(((row.method, row.ns) for row in group), key=lambda one: one[1])
        slower = "; ".join(f"{_readable(method)} {_us(other_ns)}" for method, other_ns in others)
        if eager and (operation, least_bytes) in both:
            operation += ", in one step"
        name = operation if operation != before else ""
        cells = (name, format_size(least_bytes), _readable(fastest), _us(ns), slower)
        table.add_row(*(Text(printable(cell)) for cell in cells))
        before = operation
    return table


def _readable(method: str) -> str:
    """Return ``"cached (by all, small chunks)"`` for ``"cached, by all, small chunks"``."""
    transfer, _, how = method.partition(", ")
    return f"{transfer} ({how})" if how else transfer


def _us(ns: int) -> str:
    us = ns / 1000
    return f"{us:.0f}" if us >= 1000 else f"{us:.3g}"
