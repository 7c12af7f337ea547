"""Identify the machine, or the container on it, that a process runs in."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

__all__ = ["host_identity"]


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def host_identity(*namespaces: str) -> str:
    """Return the same text for processes of one boot of one machine that share these namespaces of Linux.

    Args:
        namespaces: names in ``/proc/self/ns``, such as ``"net"``; a container may have its own.

    Raises:
        OSError: this system has no such files.
    """
    # Asked for again where no descriptor may be left for a file.
    return "-".join((_boot(), *(str(os.stat(f"/proc/self/ns/{one}").st_ino) for one in namespaces)))
