"""Identify the machine, or the container on it, that a process runs in."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

__all__ = ["host_identity", "host_name", "process_space"]


def host_name() -> str:
    r"""Return this host's name as text that can be printed and sent: bytes that are none are as in ``h\xf6st``."""
    # Python shows such bytes as surrogates, which neither stores nor terminals take.
    name = socket.gethostname().encode(errors="surrogateescape").decode(errors="backslashreplace")
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in name)


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


def process_space(*namespaces: str) -> str:
    """Return the same text for processes that see each other's pids, and the same times at which they began.

    A time namespace shifts the times in ``/proc/PID/stat``, and the monotonic clock.

    Args:
        namespaces: others that they share, as in :func:`host_identity`.

    Raises:
        OSError: this system has no such files.
    """
    time = ("time",) if os.path.exists("/proc/self/ns/time") else ()  # Linux has them since 5.6
    return host_identity("pid", *time, *namespaces)
