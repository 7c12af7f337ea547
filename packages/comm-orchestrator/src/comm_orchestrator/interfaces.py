"""Network interfaces: which of them leads to the other ranks, and how NCCL's way of naming them reads for gloo."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import psutil

from comm_utils.errors import LaunchError
from comm_utils.host_identity import host_name

__all__ = [
    "Addresses",
    "addresses",
    "interface_for",
    "is_for_other_hosts",
    "local_address_to",
    "matching",
    "numeric",
    "outward_address",
    "variables",
]

Addresses = Mapping[str, list[str]]

# Of containers and virtual machines on this host.
_VIRTUAL = ("cni", "docker", "lxcbr", "podman", "veth", "virbr")
# Of the kernel's include/uapi/linux/sockios.h and if.h: a name of 16 bytes, then the flags.
_SIOCGIFFLAGS, _IFF_UP, _IFREQ = 0x8913, 1, struct.Struct("16sH22x")


def addresses() -> dict[str, list[str]]:
    """Interfaces of this machine that are up -> their IPv4 and IPv6 addresses."""
    found = psutil.net_if_addrs()
    try:
        up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    except FileNotFoundError:  # psutil reads the names in /proc, which is not mounted here
        up = {name for name in found if _is_up(name)}
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [address.address.split("%")[0] for address in own if address.family in families]
        for name, own in found.items()
        if name in up
    }


def _is_up(name: str) -> bool:
    """Ask the kernel of Linux for an interface's flags."""
    if sys.platform != "linux":
        return True
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFFLAGS, _IFREQ.pack(os.fsencode(name), 0))
        except OSError:  # it has been removed meanwhile
            return False
    return bool(_IFREQ.unpack(answer)[1] & _IFF_UP)


def numeric(address: tuple[Any, ...]) -> str:
    """Return the host of a socket's address, with the interface of a link-local one, as in ``fe80::1%eth0``."""
    return socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def local_address_to(host: str) -> str | None:
    """Return this machine's address on the way to ``host``, as in ``fe80::1%eth0``; None where there is no way.

    Sends nothing.
    """
    with contextlib.suppress(OSError, UnicodeError):  # the latter where it is no host name
        for family, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
                sock.connect(address)
                return numeric(sock.getsockname())
    return None


def is_for_other_hosts(address: str | None) -> bool:
    """Return True where another host can use ``address``: it has a loopback address itself, and link-local ones too."""
    with contextlib.suppress(ValueError):
        return not (ipaddress.ip_address(address or "").is_loopback or _is_link_local(address))
    return False


def _is_link_local(address: str | None) -> bool:
    """Return True for a link-local address of IPv6, which leads to another host through its interface alone."""
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(address or "")
        return parsed.version == 6 and parsed.is_link_local
    return False


def outward_address(found: Addresses) -> str | None:
    """Return an address of this machine that others might reach.

    That of the default route, else one that is not local; those of virtual bridges, which lead to this host alone, come
    last.
    """
    names = sorted(found, key=lambda name: (name.startswith(_VIRTUAL), name))
    own = [address for name in names for address in found[name]]
    for documentation in ("192.0.2.1", "2001:db8::1"):
        routed = local_address_to(documentation)
        if routed in own and not ipaddress.ip_address(str(routed)).is_loopback:
            return routed
    outward = [
        one for one in own if not (ipaddress.ip_address(one).is_loopback or ipaddress.ip_address(one).is_link_local)
    ]
    return next((address for address in outward if ":" not in address), next(iter(outward), None))


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that a pattern in NCCL's syntax means.

    ``eth,ib`` are prefixes, ``=eth0`` a name, ``^docker,lo`` all but these prefixes, ``^=lo`` all but a name.
    Source: NCCL's documentation of NCCL_SOCKET_IFNAME.
    """
    negated = pattern.startswith("^")
    body = pattern.removeprefix("^")
    exact = body.startswith("=")
    parts = [part.strip() for part in body.removeprefix("=").split(",") if part.strip()]

    def meant(name: str) -> bool:
        return name in parts if exact else any(name.startswith(part) for part in parts)

    return [name for name in names if meant(name) != negated]


def interface_for(address: str | None, found: Addresses) -> str | None:
    """Return the interface that has ``address``; for a loopback address any that has one."""
    if address is None:
        return None
    address, _, scope = address.partition("%")  # of a link-local address, which several interfaces may have
    if scope in found and address in found[scope]:
        return scope
    for name, own in found.items():
        if address in own:
            return name
    if ipaddress.ip_address(address).is_loopback:
        has_loopback = (
            name for name, own in found.items() if any(ipaddress.ip_address(one).is_loopback for one in own)
        )
        return next(has_loopback, None)
    return None


def variables(
    given: Mapping[str, str], peer: str | None, found: Addresses, ccl: bool, gloo: bool = False
) -> dict[str, str]:
    """Variables that make gloo (and oneCCL) use the interface that leads to the other ranks.

    Args:
        given: the environment with the configuration applied; what it says already is kept, where gloo can read it.
        peer: an address of another host; ``""`` where there is one but nobody knows its address, None where all ranks
            are on this one.
        found: :func:`addresses`.
        ccl: oneCCL's variables too.
        gloo: gloo is about to start, which needs an interface.

    Raises:
        LaunchError: a pattern that means none of this machine's interfaces, or an interface without an address, also
            the loopback interface where gloo is to use it.
    """
    own = "127.0.0.1" if peer is None else local_address_to(peer) if peer else None
    leads_to_peer = is_for_other_hosts(own) or _is_link_local(own)
    if peer is not None and not leads_to_peer:  # Debian resolves a host's own name to 127.0.1.1
        own = outward_address(found)
    chosen = interface_for(own, found)
    result: dict[str, str] = {}
    asked = given.get("GLOO_SOCKET_IFNAME") or None  # empty counts as not set, as it does for gloo
    if asked is None and peer is not None and given.get("NCCL_SOCKET_IFNAME"):
        with contextlib.suppress(LaunchError):  # NCCL itself will say so
            chosen = _among("NCCL_SOCKET_IFNAME", given["NCCL_SOCKET_IFNAME"], chosen, found)
    if asked is not None and any(name.strip() not in found for name in asked.split(",")):
        chosen = result["GLOO_SOCKET_IFNAME"] = _among("GLOO_SOCKET_IFNAME", asked, chosen, found)
    elif asked is not None:
        chosen = asked.split(",")[0].strip()
        if not found[chosen]:
            raise LaunchError(
                f"GLOO_SOCKET_IFNAME={asked!r}: the interface {chosen} of {host_name()} has no address; up "
                f"with one: {_listed(found)}; name one of these, or unset the variable"
            )
    elif chosen is not None:
        result["GLOO_SOCKET_IFNAME"] = chosen
    elif gloo and peer is None:
        raise LaunchError(
            f"gloo needs a loopback interface for ranks of one host; of the interfaces of {host_name()} that "
            f"are up, none has a loopback address: {_listed(found)}; set it up (ip link set lo up; ip address add "
            "127.0.0.1/8 dev lo), or name another interface in GLOO_SOCKET_IFNAME"
        )
    if ccl and chosen is not None:
        result |= {name: chosen for name in ("CCL_KVS_IFACE", "FI_TCP_IFACE") if name not in given}
    return result


def _among(variable: str, pattern: str, preferred: str | None, found: Addresses) -> str:
    usable = [name for name in matching(pattern, sorted(found)) if found[name]]
    if not usable:
        raise LaunchError(
            f"{variable}={pattern!r} means none of the interfaces of {host_name()}: {_listed(found)}; unset "
            "it, or name one of them"
        )
    return preferred if preferred in usable else usable[0]


def _listed(found: Addresses) -> str:
    return ", ".join(f"{name} ({', '.join(own)})" for name, own in sorted(found.items()) if own) or "none"
