"""What c10d's RuntimeErrors mean, and how they are told.

c10d reports a timeout, a lost peer and a wrong argument as one and the same class; only the text tells them apart.
"""

from __future__ import annotations

import re

from comm_utils.errors import CommError, CommTimeoutError, PeerLostError

__all__ = ["classify", "in_short", "told"]

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


# A place in the library's source, alone in brackets or within a sentence.
_SOURCE = re.compile(r"\[[^\[\]]*\.\w+:\d+\]\s*|(in: )?\S+\.(cc|cpp|cu|h|hpp):\d+[,:]?\s*")
_EMOJI = re.compile("[\u2600-\u27bf\ufe0f\U0001f000-\U0001faff]")
_WAITED = re.compile(r"waiting (\d+) ?ms")
_LONGEST = 200


def in_short(error: BaseException) -> str:
    """The one line of a failure that says something, without places in the library's source and well-wishing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = next((line for line in lines if _TIMEOUT.search(line) or _LOST.search(line)), lines[0])
    sentence = _EMOJI.sub("", _SOURCE.sub("", line)).split(". ")[0].strip(" .")
    return sentence if len(sentence) <= _LONGEST else f"{sentence[:_LONGEST]}..."


def told(
    kind: type[CommError],
    operation: str,
    group: str,
    rank: int,
    error: BaseException,
    limit_s: float | None,
    of_call: bool = False,
) -> str:
    """What happened, where it was seen, and what may be the cause; not yet how to go on.

    Args:
        kind: from :func:`classify`.
        group: as in ``the group of ranks [0, 1]``.
        rank: the global rank of this process.
        limit_s: the timeout, if it is known.
        of_call: it was the call's own, not the group's.
    """
    if kind is PeerLostError:
        return (
            f"{operation} on {group} lost a peer, as seen by rank {rank}: another rank of the group ended, gave up or "
            "lost its connection; its own output says why"
        )
    waited = None if of_call else _WAITED.search(str(error))
    after_s = int(waited[1]) / 1000 if waited else limit_s
    after = "" if after_s is None else f" after {after_s:g} s"
    return (
        f"{operation} on {group} timed out{after}, as seen by rank {rank}: a rank of the group did not take part, or "
        "is late; a dist.monitored_barrier() before the call names who, and timeout= of "
        f"{'this call' if of_call else 'init_distributed() and new_group()'} sets the limit"
    )
