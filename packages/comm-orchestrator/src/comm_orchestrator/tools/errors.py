"""Errors of a command, in one sentence: wrong usage, or a failure."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from comm_orchestrator.tools.output import printable
from comm_utils.errors import CommError

if TYPE_CHECKING:
    from comm_utils.launch import LaunchInfo

__all__ = [
    "EXPECTED",
    "let_others_speak",
    "print_error",
    "print_nothing_more",
    "tell",
    "tell_in_turn",
]

#: Errors that :func:`tell` has a sentence for.
EXPECTED = (CommError, OSError, UnicodeDecodeError)


# Launchers look for ranks that have failed several times a second.
_OTHERS_SPEAK_S = 1.5


def tell(error: Exception) -> int:
    """Print one of :data:`EXPECTED` on stderr; the exit code: 2, or 0 if the reader of the output has closed it."""
    if isinstance(error, BrokenPipeError):
        print_nothing_more()
        return 0
    what = str(error)
    if isinstance(error, UnicodeDecodeError):
        what = f"got a file that is not text ({error}); expected JSON"
    elif isinstance(error, OSError) and not isinstance(error, CommError):
        if error.filename:
            what = f"{error.filename}: {error.strerror}"
        else:  # of what is printed
            print_nothing_more()
    print_error(what)
    return 2


def print_error(what: str, *, rank: int | None = None) -> None:
    """Print an error, of ``rank`` where it may be that rank's alone, on stderr, after what was printed before."""
    with suppress(OSError):
        sys.stdout.flush()
    who = "" if rank is None else f"rank {rank}: "
    print(f"error: {who}{printable(what, lines=True)}", file=sys.stderr, flush=True)


def tell_in_turn(error: CommError, launch: LaunchInfo) -> int:
    """Print, on rank 0, why ranks that a launcher started do not begin; the exit code.

    What is wrong on another host only, the first rank there prints, if rank 0 has not been the reason for its end.
    """
    if not launch.rank:
        return tell(error)
    let_others_speak()
    if not launch.local_rank:
        print_error(str(error), rank=launch.rank)
    return 2


def let_others_speak() -> None:
    """Wait while the rank that knows the reason prints it: a launcher ends all ranks as soon as one fails."""
    time.sleep(_OTHERS_SPEAK_S)


def print_nothing_more() -> None:
    """Discard output that is still to be written at the end of the process."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
