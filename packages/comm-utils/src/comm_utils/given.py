"""Values that callers gave, for error messages, and the timeouts among them."""

from __future__ import annotations

import math
from datetime import timedelta

from comm_utils.errors import ArgumentError, ArgumentTypeError

__all__ = ["LONGEST", "SHORTEST_TIMEOUT", "seconds_to_wait", "shown"]

_MOST = 60
# A century. The libraries add a timeout in ns to the time of day, in 64 bits, which overflows in the year 2262.
LONGEST = timedelta(days=36_525)
#: c10d counts milliseconds, and takes none for no limit.
SHORTEST_TIMEOUT = timedelta(milliseconds=1)


def shown(value: object) -> str:
    """Return ``repr(value)`` in one short line, or the name of its type where there is no ``repr``."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of an object that is only half made, or of an int with too many digits
        return f"<{type(value).__name__}>"
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


def seconds_to_wait(timeout: object) -> float | None:
    """Return the timeout of a handle's ``wait()`` in seconds, however it was given.

    What is over already is 0; more than a century is no limit, which is None.

    Raises:
        ArgumentTypeError: it is neither a number nor a timedelta nor None.
        ArgumentError: it is not a number of seconds, such as NaN.
    """
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise ArgumentTypeError(f"wait: timeout: got {shown(timeout)}; expected seconds or a timedelta, or None")
    if timeout > LONGEST.total_seconds():
        return None
    if timeout <= 0:
        return 0.0
    if math.isnan(timeout):
        raise ArgumentError("wait: timeout: got nan; expected seconds or a timedelta, or None")
    return float(timeout)
