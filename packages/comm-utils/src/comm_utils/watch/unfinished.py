"""The error of a wait with a timeout of its own, after which the operation goes on."""

from __future__ import annotations

from comm_utils.errors import CommTimeoutError
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.watch.watch import WATCH

__all__ = ["record_under_way", "still_under_way", "under_way"]

# Who waits for less asks again and again, and is not to pay for the names. Other hosts take up to a second to answer.
_NAMED_S, _ASKED_S = 0.1, 1.0


def under_way(limit_s: float, call: str, group: RingGroup) -> CommTimeoutError:
    """Return the error for ``call`` on a group, which names the ranks that are missing."""
    missing = WATCH.missing(group, asks=limit_s >= _ASKED_S) if limit_s >= _NAMED_S else ""
    return still_under_way(limit_s, f"{call} on {group}", missing)


def record_under_way(limit_s: float, number: int | None) -> CommTimeoutError:
    """Return the error for the call that the flight recorder has under ``number``, where it still has."""
    call = None if number is None else WATCH.recorded(number)
    return still_under_way(limit_s) if call is None else under_way(limit_s, call.name, call.group)


def still_under_way(limit_s: float | None, what: str = "the operation", missing: str = "") -> CommTimeoutError:
    """Return the error for ``what``; the last two arguments may be ``waits_for`` of another one.

    Args:
        limit_s: how long it was waited for; None is not known.
        missing: ranks that do not take part, and what they do instead.
    """
    within = "in time" if limit_s is None else f"within {limit_s:g} s"
    error = CommTimeoutError(
        f"{what} did not finish {within}{f': {missing}' if missing else ''}; it is still under way and may be waited "
        "for again"
    )
    error.waits_for = what, missing
    return error
