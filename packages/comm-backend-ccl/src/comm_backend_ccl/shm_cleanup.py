"""Clean-up of shared memory that killed ranks left behind."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

__all__ = ["sweep"]

# libfabric's transport through shared memory names its files by process, endpoint and a counter.
_NAME = re.compile(r"(\d+):\d+:\d+")


def sweep(folder: Path = Path("/dev/shm"), ending: bool = False) -> None:
    """Remove this user's files of libfabric's whose process has ended.

    Args:
        ending: so has this process, as good as.
    """
    with suppress(OSError):
        for path in list(folder.iterdir()):
            named = _NAME.fullmatch(path.name)
            if named is None or (_lives(int(named[1])) and not (ending and int(named[1]) == os.getpid())):
                continue
            with suppress(OSError):
                if path.stat().st_uid == os.getuid():
                    path.unlink()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
