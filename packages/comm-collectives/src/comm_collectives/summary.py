"""The comms logger's table, of this rank or against the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from comm_collectives.arguments import active, enter
from comm_collectives.instrumentation import bare_backend
from comm_collectives.objects.channel import Channel
from comm_collectives.objects.collective import all_gather_over
from comm_collectives.observed import Observed
from comm_utils.backend import Backend
from comm_utils.comms_logger import CommsLogger, Row, format_table
from comm_utils.sizes import bandwidth, format_size

__all__ = ["log_summary"]

_CALL = "log_summary"
_Key = tuple[Any, ...]


def log_summary(log: CommsLogger, show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print from rank 0 what was recorded there.

    Args:
        show_straggler: add how long each operation took beyond the rank that spent least time in it: ranks that arrive
            early wait there for those that arrive late. All ranks have to call it.
        return_dict: return what this rank recorded, on every rank: ``{"summary": {name: {size in bytes: {...}}},
            "straggler_analysis": the same or None, "metadata": {...}}``, with DeepSpeed's keys and units: times in
            milliseconds, bandwidths in Gbit/s.
    """
    backend = active(_CALL)
    rows = log.rows()
    least: dict[_Key, float] = {}
    extra = None
    if show_straggler:
        # Over the backend below the wrapper, so that the summary is in no summary.
        everyones = all_gather_over(Channel(_CALL, _unobserved(), None), [(*_key(r), r.total_s) for r in rows], False)
        for *key, total_s in (row for rows_of_one in everyones for row in rows_of_one):
            least[tuple(key)] = min(total_s, least.get(tuple(key), math.inf))
        extra = ("straggler ms", [f"{(row.total_s - least[_key(row)]) * 1e3:.2f}" for row in rows])
    if backend.get_rank(None) == 0:
        print(format_table(rows, extra) if rows else _nothing(isinstance(backend, Observed)), flush=True)
    if not return_dict:
        return None
    return {
        "summary": _by_name(rows, _numbers),
        "straggler_analysis": _by_name(rows, lambda same: _stragglers(same, least)) if show_straggler else None,
        "metadata": {
            "world_size": backend.get_world_size(None),
            "rank": backend.get_rank(None),
            "timestamp": datetime.now().isoformat(),
        },
    }


def _key(row: Row) -> _Key:
    return row.name, row.operation, row.size_bytes, str(row.ranks or row.world_size), row.caller


def _by_name(rows: Sequence[Row], numbers: Any) -> dict[str, dict[int, dict[str, Any]]]:
    """``{name: {size: numbers}}``; rows that differ in nothing that DeepSpeed tells apart are taken together."""
    found: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        name = f"{row.name} | [Caller Func: {row.caller}]" if row.caller else row.name
        found.setdefault(name, {}).setdefault(row.size_bytes, []).append(row)
    return {
        name: {
            size: {**numbers(same), "msg_size_bytes": size, "msg_size_str": format_size(size)}
            for size, same in sizes.items()
        }
        for name, sizes in found.items()
    }


def _numbers(rows: Sequence[Row]) -> dict[str, Any]:
    calls, total_s = sum(row.calls for row in rows), sum(row.total_s for row in rows)
    first = rows[0]
    rate = bandwidth(first.operation, first.size_bytes, total_s / calls, first.world_size)
    return {
        "count": calls,
        "total_latency_ms": total_s * 1e3,
        "avg_latency_ms": total_s / calls * 1e3,
        "min_latency_ms": min(row.min_s for row in rows) * 1e3,
        "median_latency_ms": max(rows, key=lambda row: row.calls).median_s * 1e3,
        "tput_avg_gbps": rate.algbw_gb_per_s * 8,
        "busbw_avg_gbps": rate.busbw_gb_per_s * 8,
    }


def _stragglers(rows: Sequence[Row], least: Mapping[_Key, float]) -> dict[str, Any]:
    calls, total_s = sum(row.calls for row in rows), sum(row.total_s for row in rows)
    own_s = sum(least[_key(row)] for row in rows)
    return {
        "count": calls,
        "total_comm_lat_ms": own_s * 1e3,
        "total_straggler_ms": (total_s - own_s) * 1e3,
        "avg_comm_lat_ms": own_s / calls * 1e3,
        "avg_straggler_ms": (total_s - own_s) / calls * 1e3,
    }


def _unobserved() -> Backend:
    enter(_CALL, None)  # raises where the world's group has failed
    return bare_backend().during(_CALL)


def _nothing(is_on: bool) -> str:
    if is_on:
        return "The comms logger is on, and rank 0 has recorded no operation that it is to record."
    return "The comms logger is off and has recorded nothing; configure(enabled=True) turns it on."
