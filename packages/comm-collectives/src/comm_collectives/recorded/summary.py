"""The comms logger's table, of this rank or beside the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any, TypeVar

import torch

from comm_collectives.arguments import active
from comm_collectives.instrumentation import instrumented
from comm_collectives.objects.collective import all_gather_over, exchange_to_root
from comm_collectives.recorded.clocks import clock_name
from comm_collectives.recorded.trace_files import everyones_clock, recent_trace, unobserved
from comm_utils.observability.comms_logger import CommsLogger, Row
from comm_utils.observability.log_table import format_account, format_table
from comm_utils.observability.sequence import EPOCH
from comm_utils.observability.traces.alignment import aligned
from comm_utils.observability.traces.events import Event, Operation, RankTrace
from comm_utils.observability.traces.waiting import Account, Key, Share, Straggler, account
from comm_utils.sizes import bandwidth, format_size
from comm_utils.torch_support import factories

__all__ = ["everyones_account", "log_summary", "logged_name"]

_CALL = "log_summary"
_T = TypeVar("_T")


def log_summary(log: CommsLogger, show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print from rank 0 what was recorded there.

    Args:
        show_straggler: also how the time of the last operations, over all ranks, divides into waiting for others and
            transfer, and which ranks were waited for. All ranks have to call it.
        return_dict: return what this rank recorded, on every rank: ``{"summary": {name: {size in bytes: {...}}},
            "straggler_analysis": the same or None, "stragglers": a list of ranks, "metadata": {...}}``, with
            DeepSpeed's keys and units: times in milliseconds, bandwidths in Gbit/s.
    """
    backend = active(_CALL)
    rank = backend.get_rank(None)
    rows = log.rows()
    everyones = everyones_account(log) if show_straggler else None
    if rank == 0:
        print(
            format_table(rows) if rows else _nothing(any(getattr(one, "log", None) is log for one in instrumented())),
            flush=True,
        )
        if everyones is not None and everyones.operations:
            print(f"\nOver all ranks, of the last operations:\n{format_account(everyones)}", flush=True)
    if not return_dict:
        return None
    found: dict[str, Any] = {
        "summary": _by_name([(row.name, row.caller, row.size_bytes, row) for row in rows], _numbers),
        "straggler_analysis": None,
        "metadata": {
            "world_size": backend.get_world_size(None),
            "rank": rank,
            "timestamp": datetime.now().isoformat(),
        },
    }
    if everyones is not None:
        shares = sorted(everyones.shares[rank].items())
        mine = [(key.name, key.caller, key.size_bytes, share) for key, share in shares]
        found["straggler_analysis"] = _by_name(mine, _stragglers)
        found["stragglers"] = [
            {
                "rank": one.rank,
                "host": one.host,
                "pid": one.pid,
                "last": one.last,
                "caused_ms": one.caused_ns * 1e-6,
                "typical_late_ms": one.typical_late_ns * 1e-6,
            }
            for one in everyones.stragglers
        ]
    return found


def everyones_account(log: CommsLogger) -> Account:
    """Return where the time of the last operations of all ranks went; called by all ranks."""
    channel = unobserved(_CALL)
    clock = everyones_clock(channel, all_gather_over(channel, clock_name(), False))
    mine = [log.sequences.epoch, *_plain(recent_trace(log, channel, clock))]
    gathered = exchange_to_root(channel, mine, 0, 0, False)
    found = None
    if gathered is not None:
        # The epoch in which a rank is now is the one in which the others are.
        latest = max(epoch for epoch, *_ in gathered)
        found = _plain_account(account(aligned([_trace(plain, latest - epoch) for epoch, *plain in gathered])))
    # Through rank 0 alone, as the events of all ranks may be many; what they come to is little.
    return _account(all_gather_over(channel, found, False)[0])


def _plain(trace: RankTrace) -> list[Any]:
    numbers: dict[Operation, int] = {}
    found = [
        (numbers.setdefault(event.operation, len(numbers)), event.sequence, event.begin_ns, event.end_ns)
        for event in trace.events
    ]
    events = factories.tensor(found, dtype=torch.int64, device="cpu").reshape(-1, 4)
    header = {name: value for name, value in asdict(replace(trace, events=[])).items() if name != "events"}
    return [header, [asdict(operation) for operation in numbers], events]


def _trace(plain: Sequence[Any], epochs_behind: int) -> RankTrace:
    header, operations, events = plain
    known = [Operation(**one) for one in operations]
    more = epochs_behind * EPOCH
    found = [
        Event(known[number], sequence + more if sequence >= 0 else -1, begin, end, end)
        for number, sequence, begin, end in events.tolist()
    ]
    return RankTrace(**header, events=found)


def _plain_account(found: Account) -> list[Any]:
    shares = [
        [rank, [[list(key), share.calls, share.total_ns, share.waiting_ns] for key, share in shares.items()]]
        for rank, shares in found.shares.items()
    ]
    stragglers = [
        [one.rank, one.host, one.pid, one.last, one.caused_ns, [one.typical_late_ns]] for one in found.stragglers
    ]
    return [shares, stragglers, found.operations, found.unmatched]


def _account(plain: Sequence[Any]) -> Account:
    shares, stragglers, operations, unmatched = plain
    return Account(
        {rank: {_key(key): Share(*rest) for key, *rest in found} for rank, found in shares},
        [Straggler(*one) for one in stragglers],
        operations,
        unmatched,
    )


def _key(plain: Sequence[Any]) -> Key:
    name, operation, size, ranks, caller, method = plain
    return Key(name, operation, size, tuple(ranks), caller, method)


def logged_name(name: str, caller: str) -> str:
    """Return the name of an operation in DeepSpeed's form, with the caller where one was recorded."""
    return f"{name} | [Caller Func: {caller}]" if caller else name


def _by_name(
    found: Sequence[tuple[str, str, int, _T]], numbers: Callable[[list[_T]], dict[str, Any]]
) -> dict[str, Any]:
    """``{name: {size: numbers}}``; what differs in nothing that DeepSpeed tells apart is taken together."""
    named: dict[str, dict[int, list[_T]]] = {}
    for name, caller, size, one in found:
        named.setdefault(logged_name(name, caller), {}).setdefault(size, []).append(one)
    return {
        name: {
            size: {**numbers(same), "msg_size_bytes": size, "msg_size_str": format_size(size)}
            for size, same in sizes.items()
        }
        for name, sizes in named.items()
    }


def _numbers(rows: list[Row]) -> dict[str, Any]:
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


def _stragglers(shares: list[Share]) -> dict[str, Any]:
    calls = sum(share.calls for share in shares)
    transfer_ns, waiting_ns = sum(share.transfer_ns for share in shares), sum(share.waiting_ns for share in shares)
    return {
        "count": calls,
        "total_comm_lat_ms": transfer_ns * 1e-6,
        "total_straggler_ms": waiting_ns * 1e-6,
        "avg_comm_lat_ms": transfer_ns / calls * 1e-6,
        "avg_straggler_ms": waiting_ns / calls * 1e-6,
    }


def _nothing(is_on: bool) -> str:
    if is_on:
        return "The comms logger is on, and rank 0 has recorded no operation that it is to record."
    return "The comms logger is off and has recorded nothing; configure(enabled=True) turns it on."
