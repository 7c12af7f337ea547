"""Links what one virtual environment has compiled into others that hold the very same files.

An import of torch compiles two thousand modules where no bytecode is cached, and every session of nox has an
environment of its own. uv installs hard links to files of its cache. So the same file is recognised by its inode, and
its bytecode, which names the file's size and time, is valid for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import source_from_cache
from pathlib import Path

__all__ = ["link_bytecode"]


def link_bytecode(site: Path, others: Iterable[Path]) -> int:
    """Link into ``site`` the bytecode that ``others`` have of files of ``site``; return how many files that were.

    Args:
        site: a ``site-packages`` folder.
        others: those of environments of the same Python.
    """
    linked = 0
    for other in others:
        for cached in other.rglob("__pycache__/*.pyc"):
            place = site / cached.relative_to(other)
            if place.exists():
                continue
            # What is not there, or was removed meanwhile, is compiled when it is imported; pytest's own has no source.
            with suppress(OSError, ValueError):
                source = Path(source_from_cache(cached))
                if os.path.samefile(source, site / source.relative_to(other)):
                    place.parent.mkdir(exist_ok=True)
                    os.link(cached, place)
                    linked += 1
    return linked
