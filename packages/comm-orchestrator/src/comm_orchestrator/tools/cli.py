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
    """Run the command line; without torch or its own libraries, say how to install them."""
    # Not KeyboardInterrupt, of which click makes "Aborted." and exit code 1.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    _open_outputs()
    try:
        from comm_orchestrator.tools.output import accept_any_text

        accept_any_text()
        from comm_orchestrator.tools.commands import app

        app()
    except ImportError as error:
        missing = _missing(error)
        if not missing:
            raise
        print(missing, file=sys.stderr)
        raise SystemExit(2) from None
    except _InterruptedError:  # also while torch is imported, which takes a second
        print(f"{_CLEAR if sys.stderr.isatty() else ''}interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def _missing(error: ImportError) -> str:
    """Return a sentence for a library that cannot be imported, with the remedy; empty for others than these."""
    name = error.name or ""
    if name in ("typer", "rich"):
        return "commctl needs typer and rich; install them with: pip install 'comm-orchestrator[cli]'"
    if name.partition(".")[0] == "torch" and "torch" not in sys.modules:
        forced = "" if name == "torch" else "--force-reinstall "  # a part of it is there, such as without its libraries
        command = f"{sys.executable} -m pip install {forced}torch"
        return f"error: this command needs torch, which cannot be imported: {error}; install it with: {command}"
    return ""


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
