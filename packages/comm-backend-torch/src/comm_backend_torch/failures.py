"""What c10d's RuntimeErrors mean.

c10d reports a timeout, a lost peer and a wrong argument as one and the same class; only the text tells them apart.
"""

from __future__ import annotations

import re

from comm_utils.errors import CommError, CommTimeoutError, PeerLostError

__all__ = ["classify"]

_TIMEOUT = re.compile(r"time[d]?[ -]?out", re.IGNORECASE)
_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|socket closed|read error|write error"
    r"|remote process exited|peer|no route to host",
    re.IGNORECASE,
)


def classify(error: BaseException) -> type[CommError] | None:
    """The error of ours that a failure of c10d amounts to; None where it is about neither time nor peers."""
    text = str(error)
    if _TIMEOUT.search(text):
        return CommTimeoutError
    if _LOST.search(text):
        return PeerLostError
    return None
