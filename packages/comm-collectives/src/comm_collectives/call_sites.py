"""The line of a program that made a call which a compiler has put into a graph.

While a graph runs, the frames of the program are gone: what calls is generated code. The line is therefore found while
the call is traced, and the call is made from a frame that has its file, number and function. So everything that looks
for the caller finds it: the flight recorder, the comms logger, the traceback of an error. The same is done for a call
that goes on in a thread of this package.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch._guards

from comm_utils.flight_recorder.call_sites import line_of_program

__all__ = ["calling_from", "from_here", "traced_line"]

#: Calls a function by keywords.
Calling = Callable[[Callable[..., Any], dict[str, Any]], Any]

_PACKAGES = ("comm_utils", "comm_collectives", "comm_orchestrator", "comm_backend_torch", "comm_backend_ccl")
_OURS = tuple(f"{os.sep}{name}{os.sep}" for name in _PACKAGES)
# A program that makes its code at run time could have lines without end.
_MOST_KNOWN = 4096
_MOST_LINES = 1_000_000

_known: dict[str, Calling] = {}


def traced_line() -> str:
    """Return the line of the program that is being traced, as ``"file:line function"``; "" where it is not known."""
    try:
        stack = torch._guards.TracingContext.extract_stack()
    except Exception:  # no public function: without it, callers are generated code
        return ""
    for frame in reversed(stack):
        if not frame.filename.startswith("<") and not any(one in frame.filename for one in _OURS):
            return f"{frame.filename}:{frame.lineno} {frame.name}"
    return ""


def from_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for another thread that calls ``function`` as from the line that the program runs now."""
    calling = calling_from(line_of_program())
    return lambda *given: calling(partial(function, *given), {})


def calling_from(line: str) -> Calling:
    """Return a function that calls another one from a frame at ``line``, which is of :func:`traced_line`."""
    found = _known.get(line)
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            return _calling
        found = _known[line] = _make(line)
    return found


def _calling(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    return function(**given)


def _make(line: str) -> Calling:
    place, _, name = line.rpartition(" ")
    filename, _, number = place.rpartition(":")
    if not number.isdecimal() or not 0 < int(number) < _MOST_LINES:
        return _calling
    known: dict[str, Any] = {"__name__": filename}
    # The whole function is on that line.
    exec(
        compile("\n" * (int(number) - 1) + "def made(function, given): return function(**given)", filename, "exec"),
        known,
    )
    made: Any = known["made"]
    made.__code__ = made.__code__.replace(co_name=name)
    calling: Calling = made
    return calling
