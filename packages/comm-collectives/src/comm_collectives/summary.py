"""The comms logger's table, of this rank or against the others."""

from __future__ import annotations

from typing import Any

from comm_collectives.groups import get_rank
from comm_collectives.objects import allgather_object
from comm_utils.comms_logger import CommsLogger, format_table

__all__ = ["log_summary"]


def log_summary(log: CommsLogger, show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print from rank 0 what was recorded there.

    Args:
        show_straggler: add how long each operation took beyond the rank that spent least time in it: ranks that arrive
            early wait there for those that arrive late. All ranks have to call it.
        return_dict: return the rows as ``{operation: {size in bytes: [{...}, ...]}}`` on every rank.
    """
    rows = log.rows()
    extra = None
    if show_straggler:
        mine = [(row.operation, row.size_bytes, row.world_size, row.caller, row.total_s) for row in rows]
        least: dict[tuple[Any, ...], float] = {}
        for theirs in allgather_object(mine):
            for *key, total_s in theirs:
                least[tuple(key)] = min(total_s, least.get(tuple(key), total_s))
        waited = [row.total_s - least[row.operation, row.size_bytes, row.world_size, row.caller] for row in rows]
        extra = ("straggler ms", [f"{seconds * 1e3:.2f}" for seconds in waited])
    if get_rank() == 0:
        print(format_table(rows, extra), flush=True)
    return log.as_dict() if return_dict else None
