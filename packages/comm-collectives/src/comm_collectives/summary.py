"""The comms logger's table, of this rank or against the others."""

from __future__ import annotations

from typing import Any, cast

from comm_collectives.arguments import active, enter
from comm_collectives.instrumentation import bare_backend
from comm_collectives.objects.channel import Channel
from comm_collectives.objects.collective import all_gather_over
from comm_collectives.observed import Observed
from comm_utils.backend import Backend
from comm_utils.comms_logger import CommsLogger, format_table

__all__ = ["log_summary"]

_CALL = "log_summary"


def log_summary(log: CommsLogger, show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print from rank 0 what was recorded there.

    Args:
        show_straggler: add how long each operation took beyond the rank that spent least time in it: ranks that arrive
            early wait there for those that arrive late. All ranks have to call it.
        return_dict: return the rows as ``{operation: {size in bytes: [{...}, ...]}}`` on every rank.
    """
    backend = active(_CALL)
    rows = log.rows()
    extra = None
    if show_straggler:
        mine = [(row.operation, row.size_bytes, row.world_size, row.caller, row.total_s) for row in rows]
        least: dict[tuple[Any, ...], float] = {}
        # Over the backend below the wrapper, so that the summary is in no summary.
        for theirs in all_gather_over(Channel(_CALL, _unobserved(), None), mine, False):
            for *key, total_s in theirs:
                least[tuple(key)] = min(total_s, least.get(tuple(key), total_s))
        waited = [row.total_s - least[row.operation, row.size_bytes, row.world_size, row.caller] for row in rows]
        extra = ("straggler ms", [f"{seconds * 1e3:.2f}" for seconds in waited])
    if backend.get_rank(None) == 0:
        print(format_table(rows, extra) if rows else _nothing(isinstance(backend, Observed)), flush=True)
    return log.as_dict() if return_dict else None


def _unobserved() -> Backend:
    enter(_CALL, None)  # raises where the world's group has failed
    bare = bare_backend()
    during = getattr(bare, "during", None)
    return bare if during is None else cast(Backend, during(_CALL))


def _nothing(is_on: bool) -> str:
    if is_on:
        return "The comms logger is on, and rank 0 has recorded no operation that it is to record."
    return "The comms logger is off and has recorded nothing; configure(enabled=True) turns it on."
