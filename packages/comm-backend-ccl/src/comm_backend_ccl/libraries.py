"""Paths of the native libraries that were built with this package."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["LIBFABRIC", "ONECCL", "folder"]

ONECCL = "libcomm_oneccl.so"
LIBFABRIC = "libfabric.so.1"


def folder() -> Path | None:
    """Return the folder that holds ``ONECCL``, ``LIBFABRIC`` and their licences; None where they were not built."""
    # An editable package has two folders: that of its sources, and that into which the libraries were installed.
    for path in sys.modules[__package__].__path__:
        if (Path(path) / ONECCL).is_file():
            return Path(path)
    return None
