"""What the person who typed a command did wrong, in one sentence."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

from comm_utils.errors import CommError

__all__ = ["as_one_sentence"]

Parameters = ParamSpec("Parameters")


def as_one_sentence(run: Callable[Parameters, int]) -> Callable[Parameters, int]:
    """Exit code 2 and a sentence on stderr for errors of ours and of the file system."""

    @functools.wraps(run)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> int:
        try:
            return run(*args, **kwargs)
        except BrokenPipeError:
            # Whoever read the output, such as head, has seen enough.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except OSError as error:
            what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            print(f"error: {what}", file=sys.stderr)
        except UnicodeDecodeError as error:
            print(f"error: got a file that is not text ({error}); expected JSON", file=sys.stderr)
        except CommError as error:
            print(f"error: {error}", file=sys.stderr)
        return 2

    return wrapped
