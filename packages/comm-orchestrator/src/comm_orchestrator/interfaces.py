"""Network interfaces: which of them leads to the other ranks, and how NCCL's way of naming them reads for gloo."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Mapping

import psutil

from comm_utils.errors import LaunchError

__all__ = ["Addresses", "addresses", "interface_for", "local_address_to", "matching", "variables"]

Addresses = Mapping[str, list[str]]


def addresses() -> dict[str, list[str]]:
    """Interfaces of this machine that are up -> their IPv4 and IPv6 addresses."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [address.address.split("%")[0] for address in found if address.family in families]
        for name, found in psutil.net_if_addrs().items()
        if name in up
    }


def local_address_to(host: str) -> str | None:
    """Return this machine's address on the way to ``host``; None where there is no way. Sends nothing."""
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
                sock.connect(address)
                return str(sock.getsockname()[0])
    return None


def outward_address(found: Addresses) -> str | None:
    """Return an address of this machine that others might reach.

    That of the default route, else one that is not local.
    """
    own = [address for name in sorted(found) for address in found[name]]
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
    for name, own in found.items():
        if address in own:
            return name
    if ipaddress.ip_address(address).is_loopback:
        has_loopback = (
            name for name, own in found.items() if any(ipaddress.ip_address(one).is_loopback for one in own)
        )
        return next(has_loopback, None)
    return None


def variables(given: Mapping[str, str], peer: str | None, found: Addresses, ccl: bool) -> dict[str, str]:
    """Variables that make gloo (and oneCCL) use the interface that leads to the other ranks.

    Args:
        given: the environment with the configuration applied; what it says already is kept, where gloo can read it.
        peer: an address of another host; ``""`` where there is one but nobody knows its address, None where all ranks
            are on this one.
        found: :func:`addresses`.
        ccl: oneCCL's variables too.

    Raises:
        LaunchError: a pattern that means none of this machine's interfaces.
    """
    own = "127.0.0.1" if peer is None else local_address_to(peer) if peer else outward_address(found)
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
    elif chosen is not None:
        result["GLOO_SOCKET_IFNAME"] = chosen
    if ccl and chosen is not None:
        result |= {name: chosen for name in ("CCL_KVS_IFACE", "FI_TCP_IFACE") if name not in given}
    return result


def _among(variable: str, pattern: str, preferred: str | None, found: Addresses) -> str:
    usable = [name for name in matching(pattern, sorted(found)) if found[name]]
    if not usable:
        listed = ", ".join(f"{name} ({', '.join(own)})" for name, own in sorted(found.items()) if own)
        raise LaunchError(
            f"{variable}={pattern!r} means none of the interfaces of {socket.gethostname()}: {listed}; unset it, or "
            "name one of them"
        )
    return preferred if preferred in usable else usable[0]
