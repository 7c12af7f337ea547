"""The network interface for oneCCL where nobody has named one, as in programs that call ``torch.distributed`` alone."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

__all__ = ["interface_between", "missing_address"]

_SIOCGIFADDR = 0x8915


def interface_between(hosts: int) -> str:
    """Return the interface that leads to ``MASTER_ADDR``, the loopback where there is one host.

    "" if it is unknown.

    libfabric would take the fastest, which need not lead to the other hosts.
    """
    if "FI_TCP_IFACE" in os.environ:
        return ""
    if hosts == 1:
        return "lo"
    with suppress(OSError, UnicodeError):  # the latter where MASTER_ADDR is no host name
        family, _, _, _, address = socket.getaddrinfo(os.environ.get("MASTER_ADDR", ""), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            own = probe.getsockname()[0]
            found = next((name for _, name in socket.if_nameindex() if _address_of(name) == own), "")
            return "" if found == "lo" else found
    return ""


def missing_address(name: str) -> str:
    """Return what to do about an interface without an address that oneCCL can use; "" where it has one.

    Those of IPv6 will do, except for the loopback interface.
    """
    if not name or _address_of(name):
        return ""
    if name == "lo":
        return "the loopback interface lo has no IPv4 address: give it one (ip address add 127.0.0.1/8 dev lo)"
    if _has_ipv6(name):
        return ""
    return f"the interface {name} has no address: give it one, or name another interface in FI_TCP_IFACE"


def _has_ipv6(name: str) -> bool:
    with suppress(OSError):
        lines = Path("/proc/net/if_inet6").read_text(errors="surrogateescape").splitlines()
        return any(line.split(maxsplit=5)[-1].strip() == name for line in lines)
    return False


def _address_of(name: str) -> str:
    """Return the IPv4 address of an interface."""
    import fcntl  # which other systems lack, and this package says so itself

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""
