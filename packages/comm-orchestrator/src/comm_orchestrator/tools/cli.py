"""The command ``commctl``, also ``python -m comm_orchestrator``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; without its libraries, say how to install them."""
    try:
        from comm_orchestrator.tools.commands import app

        app()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print("commctl needs typer and rich; install them with: pip install 'comm-orchestrator[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # also while torch is imported, which takes a second
        raise SystemExit(130) from None
