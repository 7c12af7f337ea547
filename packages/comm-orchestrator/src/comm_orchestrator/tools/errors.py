"""Errors of a command, in one sentence: wrong usage, or a failure."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

from comm_utils.errors import CommError

__all__ = ["EXPECTED", "as_one_sentence", "print_nothing_more", "tell"]

Parameters = ParamSpec("Parameters")

#: Errors that :func:`tell` has a sentence for.
EXPECTED = (CommError, OSError, UnicodeDecodeError)


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
    print(f"error: {what}", file=sys.stderr)
    return 2


def print_nothing_more() -> None:
    """Discard output that is still to be written at the end of the process."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def as_one_sentence(run: Callable[Parameters, int]) -> Callable[Parameters, int]:
    """Return a function that returns an exit code, for errors too."""

    @functools.wraps(run)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> int:
        try:
            return run(*args, **kwargs)
        except EXPECTED as error:
            return tell(error)

    return wrapped
