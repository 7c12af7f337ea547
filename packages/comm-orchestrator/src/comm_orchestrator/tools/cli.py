"""The command ``commctl``, also ``python -m comm_orchestrator``."""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["main"]


# To the start of the line, which a progress bar may have filled; clear it; show the cursor.
_CLEAR = "\r\x1b[K\x1b[?25h"


class _InterruptedError(BaseException):
    pass


def main() -> None:
    """Run the command line; without its libraries, say how to install them."""
    # Not KeyboardInterrupt, of which click makes "Aborted." and exit code 1.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    _open_outputs()
    try:
        from comm_orchestrator.tools.output import accept_any_text

        accept_any_text()
        from comm_orchestrator.tools.commands import app

        app()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print("commctl needs typer and rich; install them with: pip install 'comm-orchestrator[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    except _InterruptedError:  # also while torch is imported, which takes a second
        print(f"{_CLEAR if sys.stderr.isatty() else ''}interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def _open_outputs() -> None:
    """Discard what is printed where the caller has closed stdout or stderr."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)  # for ranks
            setattr(sys, name, os.fdopen(number, "w"))


def _interrupt(*_: object) -> None:
    raise _InterruptedError
