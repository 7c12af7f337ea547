"""A barrier through a group's store that names the ranks that did not come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comm_utils.errors import CommError, CommTimeoutError, PeerLostError
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.layout import LIMITED
from comm_utils.group_names import listed
from comm_utils.log import logger
from comm_utils.torch_support.bounded_store import BoundedStore
from comm_utils.torch_support.store_waits import StoreWait, answers, store_has_gone
from comm_utils.watch.watch import WATCH

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["pass_monitored_barrier"]

_WAITING = "waiting"
# Of the number that a rank writes that gives up.
_MOST_NUMBER_BYTES = 20


def pass_monitored_barrier(store: Store, own: int, group: RingGroup, limit_s: float, all_missing: bool) -> None:
    """Wait in ``store`` until all members of a group have called this.

    Ranks count themselves in; the last one opens the barrier. One whose time is over counts itself out again. So a
    barrier is passed by all or by none, and all agree which one is next. Adding is atomic: who takes back a count that
    had been complete knows that the barrier was opened.

    Args:
        store: the group's own.
        own: this process's group rank.
        all_missing: name every rank that is missing when the time is over, not only the first.

    Raises:
        CommTimeoutError: on every rank that came; names those that did not. Or the store does not answer.
        PeerLostError: a member has ended.
    """
    who = f"monitored_barrier on rank {group.ranks[own]}"
    bounded = BoundedStore(store, who, limit_s)
    try:
        _pass(bounded, own, group, limit_s, all_missing)
    except CommError:
        raise
    except RuntimeError as error:
        if answers(bounded):
            raise
        raise store_has_gone(who, error) from error


def _pass(store: BoundedStore, own: int, group: RingGroup, limit_s: float, all_missing: bool) -> None:
    ranks, interruption = group.ranks, None
    passed = f"comm/monitored_barrier/passed/{own}"
    number = store.add(passed, 0)
    prefix, before = f"comm/monitored_barrier/{number}", f"comm/monitored_barrier/{number - 1}"
    store.set(f"{prefix}/here/{own}", _WAITING)
    if store.add(f"{prefix}/count", 1) == len(ranks):
        store.set(f"{prefix}/open", "")
    else:
        with StoreWait("monitored_barrier", "monitored barrier", group, ranks[own], limit_s, LIMITED) as wait:
            wait.begin()
            interruption = _await_opening(store, prefix, own, wait, limit_s, all_missing)
    store.add(passed, 1)
    # Who is here has left the one before.
    of_all = [f"{before}/{name}" for name in ("count", "open", "given_up")] if own == 0 else []
    for key in (f"{before}/here/{own}", *of_all):
        store.delete_key(key)
    if interruption is not None:
        raise interruption


def _await_opening(
    store: BoundedStore, prefix: str, own: int, wait: StoreWait, limit_s: float, all_missing: bool
) -> BaseException | None:
    """Wait until the last rank has come; count this one out again where that is in vain.

    Returns:
        what a signal handler raised, where the last rank came nevertheless.
    """
    lost: BaseException | None = None
    # Ranks that give up are counted, as clocks of hosts differ.
    given_up, before = f"{prefix}/given_up", 0
    try:
        before = store.add(given_up, 0)
        if wait.until(store, [f"{prefix}/open"], limit_s):
            return None
    except BaseException as error:
        lost = error
        if isinstance(error, PeerLostError) and not answers(store):
            raise  # with the store went the count
    ranks = wait.group.ranks
    missing = [rank for place, rank in enumerate(ranks) if not _came(store, f"{prefix}/here/{place}", before)]
    if store.add(f"{prefix}/count", -1) < len(ranks) - 1:
        store.set(f"{prefix}/here/{own}", str(store.add(given_up, 1)))
        raise lost or _not_all(missing, limit_s, all_missing, len(ranks))
    return None if isinstance(lost, CommError) else lost


def _came(store: BoundedStore, key: str, before: int) -> bool:
    """Return whether a rank is at the barrier, or has given up since ``before`` had."""
    if not store.check([key]):
        return False
    found = store.get(key)
    if found == _WAITING.encode():
        return True
    try:
        return int(found[:_MOST_NUMBER_BYTES]) > before
    except ValueError:  # no rank writes that
        return False


def _not_all(missing: list[int], limit_s: float, all_missing: bool, size: int) -> CommTimeoutError:
    if not missing:
        return CommTimeoutError(
            f"monitored_barrier: every rank came, but not all within the same {limit_s:g} s: some had given up before"
        )
    hint = "" if all_missing or size == 2 else " (wait_all_ranks=True names all that are missing)"
    named = missing if all_missing else missing[:1]
    logger.error("monitored_barrier: ranks %s did not arrive within %g s", listed(named), limit_s)
    plural, doing = "ranks" if len(named) > 1 else "rank", WATCH.absent(named, "monitored_barrier")
    return CommTimeoutError(
        f"monitored_barrier: {plural} {listed(named)[1:-1]} did not arrive within {limit_s:g} s{hint}"
        f"{f': {doing}' if doing else ''}"
    )
