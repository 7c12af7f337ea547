"""A barrier through a group's store that names the ranks that did not come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from comm_utils.errors import CommTimeoutError
from comm_utils.log import logger

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["pass_monitored_barrier"]

_WAITING = "waiting"
# Of a time, as a rank that gives up writes it.
_MOST_TIME_BYTES = 32


def pass_monitored_barrier(store: Store, own: int, ranks: Sequence[int], limit_s: float, all_missing: bool) -> None:
    """Wait in ``store`` until all members of a group have called this.

    Ranks count themselves in; the last one opens the barrier. One whose time is over counts itself out again. So a
    barrier is passed by all or by none, and all agree which one is next. Adding is atomic: who takes back a count that
    had been complete knows that the barrier was opened.

    Args:
        store: the group's own.
        own: this process's group rank.
        ranks: global ranks of the members.
        all_missing: name every rank that is missing when the time is over, not only the first.

    Raises:
        CommTimeoutError: on every rank that came; names those that did not.
    """
    passed = f"comm/monitored_barrier/passed/{own}"
    number = store.add(passed, 0)
    prefix, before = f"comm/monitored_barrier/{number}", f"comm/monitored_barrier/{number - 1}"
    store.set(f"{prefix}/here/{own}", _WAITING)
    if store.add(f"{prefix}/count", 1) == len(ranks):
        store.set(f"{prefix}/open", "")
    elif not _opened(store, f"{prefix}/open", limit_s):
        missing = [rank for place, rank in enumerate(ranks) if not _came(store, f"{prefix}/here/{place}", limit_s)]
        if store.add(f"{prefix}/count", -1) < len(ranks) - 1:
            store.set(f"{prefix}/here/{own}", str(time.time()))
            raise _not_all(missing, limit_s, all_missing, len(ranks))
    store.add(passed, 1)
    # Who is here has left the one before.
    for key in (f"{before}/here/{own}", *((f"{before}/count", f"{before}/open") if own == 0 else ())):
        store.delete_key(key)


def _came(store: Store, key: str, limit_s: float) -> bool:
    """Return whether a rank is at the barrier, or has only just given up."""
    if not store.check([key]):
        return False
    found = store.get(key)
    if found == _WAITING.encode():
        return True
    try:
        return float(found[:_MOST_TIME_BYTES]) > time.time() - limit_s
    except ValueError:  # no rank writes that
        return False


def _opened(store: Store, key: str, limit_s: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=max(0.001, limit_s)))
    except RuntimeError:
        return bool(store.check([key]))
    return True


def _not_all(missing: list[int], limit_s: float, all_missing: bool, size: int) -> CommTimeoutError:
    if not missing:
        return CommTimeoutError(
            f"monitored_barrier: every rank came, but not all within the same {limit_s:g} s: some had given up before"
        )
    hint = "" if all_missing or size == 2 else " (wait_all_ranks=True names all that are missing)"
    named = missing if all_missing else missing[:1]
    logger.error("monitored_barrier: ranks %s did not arrive within %g s", named, limit_s)
    plural = "ranks" if len(named) > 1 else "rank"
    return CommTimeoutError(
        f"monitored_barrier: {plural} {', '.join(map(str, named))} did not arrive within {limit_s:g} s{hint}"
    )
