"""Ports that all ranks of a job find without talking to each other."""

from __future__ import annotations

import zlib

__all__ = ["derived_port"]

# Below the ephemeral range (32768 on Linux, 49152 by IANA), whose ports the kernel gives to outgoing connections.
_PORTS = range(15000, 29000)


def derived_port(text: str) -> int:
    """Return a port from 15000 to 28999, the same for the same ``text`` in every process and version of Python."""
    return _PORTS[zlib.crc32(text.encode(errors="surrogateescape")) % len(_PORTS)]
