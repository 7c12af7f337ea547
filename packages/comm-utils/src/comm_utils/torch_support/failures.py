"""Classify c10d's RuntimeErrors and format them as messages.

c10d reports a timeout, a lost peer and a wrong argument as one and the same class; only the text tells them apart. A
signal handler may raise any class with any text while a call waits; the traceback tells that apart.
"""

from __future__ import annotations

import re

from comm_utils.errors import CommError, CommTimeoutError, PeerLostError
from comm_utils.torch_support.remedies import how_to_set_timeout

__all__ = [
    "after_text",
    "classify",
    "format_failure",
    "is_exhausted",
    "is_interruption",
    "raised_by_handler",
    "summarize",
]

_TIMEOUT = re.compile(r"time[d]?[ -]?out", re.IGNORECASE)
_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|socket closed|read error|write error"
    r"|remote process exited|peer|no route to host|failed to (recv|send)\b|communicator was aborted",
    re.IGNORECASE,
)
_CLOSED = re.compile(r"connection (was )?(likely )?(closed|reset)|broken pipe|socket closed", re.IGNORECASE)
_CLOSED_BY_TIMEOUT = re.compile(
    r"timed out (waiting|after)|timeout caused|wait timeout|operation timeout", re.IGNORECASE
)
_EXHAUSTED = re.compile(
    r"too many open files|(cannot|can't) allocate|bad_alloc|out of memory|resource temporarily unavailable"
    r"|start new thread",
    re.IGNORECASE,
)


def raised_by_handler(error: BaseException) -> bool:
    """Return True where a signal handler that Python called in the course of a call has raised ``error``.

    Python calls a handler with the frame that it interrupts, so this frame is an argument of the next one.
    """
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        interrupted, place = place.tb_frame, place.tb_next
        for value in list(place.tb_frame.f_locals.values()):
            if value is interrupted or (isinstance(value, tuple) and any(one is interrupted for one in value)):
                return True
    return False


def is_interruption(error: BaseException) -> bool:
    """Return True where ``error`` is no failure of the call that it ends: Ctrl-C, or what a signal handler raised."""
    return not isinstance(error, Exception) or raised_by_handler(error)


def is_exhausted(error: BaseException) -> bool:
    """Return True where the system refused this process a descriptor, memory or a thread."""
    return isinstance(error, MemoryError) or _EXHAUSTED.search(str(error)) is not None


def classify(error: BaseException) -> type[CommError] | None:
    """Return the class of :class:`CommError` for a failure of c10d; None where it concerns neither time nor peers."""
    text = str(error)
    # gloo closes its connections itself after a timeout; otherwise a closed one is another rank's doing, however the
    # message goes on, which may speak of the timeout of the call.
    if _CLOSED.search(text) and not _CLOSED_BY_TIMEOUT.search(text):
        return PeerLostError
    if _TIMEOUT.search(text):
        return CommTimeoutError
    if _LOST.search(text):
        return PeerLostError
    return None


# A place in the library's source, alone in brackets or within a sentence.
_SOURCE = re.compile(r"\[[^\[\]]*\.\w+:\d+\]\s*|(in: )?\S+\.(cc|cpp|cu|h|hpp):\d+[,:]?\s*")
# Of a failed check in gloo: the condition and its values come first, what happened comes last.
_CHECK = re.compile(r"\[enforce fail at [^\]]*\].* vs .*?\. ")
_EMOJI = re.compile("[\u2600-\u27bf\ufe0f\U0001f000-\U0001faff]")
_WAITED = re.compile(r"waiting (\d+) ?ms")
_LONGEST = 200


def summarize(error: BaseException) -> str:
    """Return the informative line of a failure, without source locations, emoji and advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = next((line for line in lines if any(one.search(line) for one in (_TIMEOUT, _LOST, _EXHAUSTED))), lines[0])
    line = _CHECK.sub("", line)
    sentences = _EMOJI.sub("", _SOURCE.sub("", line)).split(". ")
    sentence = next((one for one in sentences if _EXHAUSTED.search(one)), sentences[0]).strip(" .")
    return sentence if len(sentence) <= _LONGEST else f"{sentence[:_LONGEST]}..."


def format_failure(
    kind: type[CommError],
    operation: str,
    group: str,
    rank: int,
    error: BaseException,
    limit_s: float | None,
    of_call: bool = False,
) -> str:
    """Describe what happened, on which rank it was seen and the likely cause; the remedy is the caller's to add.

    Args:
        kind: from :func:`classify`.
        group: as in ``the group of ranks [0, 1]``.
        rank: the global rank of this process.
        limit_s: the timeout in seconds; None where it is unknown.
        of_call: the timeout is the call's own, not the group's.
    """
    if kind is PeerLostError:
        return (
            f"{operation} on {group} lost a peer, as seen by rank {rank}: another rank of the group ended, gave up or "
            "lost its connection; its own output says why"
        )
    after = after_text(error, limit_s, of_call)
    return (
        f"{operation} on {group} timed out{after}, as seen by rank {rank}: a rank of the group did not take part, or "
        f"is late; a monitored_barrier() before the call names who, and {how_to_set_timeout(of_call)}"
    )


def after_text(error: BaseException, limit_s: float | None, of_call: bool) -> str:
    """Return `` after 4 s``, the time that a call waited; empty where it is unknown."""
    waited = None if of_call else _WAITED.search(str(error))
    after_s = int(waited[1]) / 1000 if waited else limit_s
    return "" if after_s is None else f" after {after_s:g} s"
