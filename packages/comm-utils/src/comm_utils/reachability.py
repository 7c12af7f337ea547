"""Find out which hosts this one cannot reach, when a library could not connect them and does not say which."""

from __future__ import annotations

import errno
import ipaddress
import os
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

__all__ = ["Listener", "interface_address", "unreachable"]

# Of the kernel's include/uapi/linux/sockios.h.
_SIOCGIFADDR = 0x8915
_NO_ANSWER = "no answer"
_REFUSED = "Connection refused, as a process that has ended does"

_K = TypeVar("_K")


def interface_address(name: str) -> str:
    """Return the IPv4 address of an interface, else an IPv6 one; "" where it has none or this system cannot tell.

    Link-local addresses of IPv6 are left out, as another host reaches them by an interface of its own.
    """
    return _ipv4_address(name) or _ipv6_address(name)


def _ipv6_address(name: str) -> str:
    with suppress(OSError, ValueError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, _, _, own = line.split(maxsplit=5)
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if own.strip() == name and not address.is_link_local:
                return str(address)
    return ""


def _ipv4_address(name: str) -> str:
    try:
        import fcntl
    except ImportError:
        return ""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


class Listener:
    """A port at which nobody is served: who can connect to it reaches this host.

    Args:
        interface: listens there alone; the loopback, or one without an address for other hosts, opens no port.

    Attributes:
        address: such as ``"10.0.0.1:4242"`` or ``"[2001:db8::1]:4242"``; "" where there is no port.
    """

    def __init__(self, interface: str) -> None:
        self.address = ""
        self._socket: socket.socket | None = None
        host = interface_address(interface) if interface and interface != "lo" else ""
        if not host:
            return
        with suppress(OSError):  # without one, messages say less
            is_ipv6 = ":" in host
            self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if is_ipv6 else socket.AF_INET)
            self.address = f"{f'[{host}]' if is_ipv6 else host}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        """Close the port."""
        opened, self._socket = self._socket, None
        if opened is not None:
            opened.close()


def unreachable(addresses: Mapping[_K, str], limit_s: float) -> dict[_K, str]:
    """Try all ``addresses`` at once, and return why those cannot be reached that do not answer in time.

    Args:
        addresses: of listeners, as :class:`Listener` has them; others, and empty ones, are left out.
    """
    found: dict[_K, str] = {}
    end = time.monotonic() + limit_s
    with ExitStack() as opened, selectors.DefaultSelector() as selector:
        for key, address in addresses.items():
            host, _, port = address.rpartition(":")
            with suppress(OSError, ValueError, OverflowError):
                parsed = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))  # no name to be asked for
                family = socket.AF_INET if parsed.version == 4 else socket.AF_INET6
                probe = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
                probe.setblocking(False)
                failure = probe.connect_ex((str(parsed), int(port)))
                if failure == errno.EINPROGRESS:
                    selector.register(probe, selectors.EVENT_WRITE, key)
                    found[key] = _NO_ANSWER
                elif failure:
                    found[key] = _reason(failure)
        while selector.get_map() and (left_s := end - time.monotonic()) > 0:
            for ready, _ in selector.select(left_s):
                selector.unregister(ready.fileobj)
                failure = _outcome(ready.fileobj)
                if failure:
                    found[ready.data] = _reason(failure)
                else:
                    del found[ready.data]
    return found


def _reason(failure: int) -> str:
    return _REFUSED if failure == errno.ECONNREFUSED else os.strerror(failure)


def _outcome(probe: object) -> int:
    """Return the error with which a connection ended; 0 where it stands."""
    assert isinstance(probe, socket.socket)
    return probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
