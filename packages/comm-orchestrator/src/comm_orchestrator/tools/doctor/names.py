"""Whether host names lead where they should."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time

from comm_orchestrator.interfaces import Addresses, outward_address
from comm_orchestrator.tools.doctor.finding import Finding
from comm_orchestrator.tools.doctor.launch import over_several_hosts
from comm_orchestrator.tools.doctor.limit import within
from comm_utils.launch import LaunchInfo

__all__ = ["check", "resolve"]

_SLOW_S = 1.0


def resolve(name: str) -> list[str]:
    """The addresses of a host, IPv4 first.

    Raises:
        OSError: it has none.
    """
    found = {str(info[4][0]).split("%")[0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    return sorted(found, key=lambda address: (":" in address, address))


def check(launch: LaunchInfo, found: Addresses, limit_s: float) -> list[Finding]:
    """This host's own name, and the master address."""
    findings = _own_name(launch, found, limit_s)
    if launch.master_addr is not None:
        findings += _master(launch, launch.master_addr, found, limit_s)
    return findings


def _look_up(name: str, what: str, limit_s: float) -> tuple[list[str], str, list[Finding]]:
    """Addresses, why there are none, and whether that took long."""
    start = time.monotonic()
    addresses, why = [], ""
    try:
        addresses = within(limit_s, lambda: resolve(name), f"looking up {name}")
    except OSError as error:  # a name that cannot be looked up in time, too
        why = str(error.strerror or error)
    took_s = time.monotonic() - start
    slow = []
    if took_s > _SLOW_S:
        text = f"looking up {what} {name} took {took_s:.1f} s"
        slow = [Finding("warning", "names", text, "check the name servers in /etc/resolv.conf", of_host=True)]
    return addresses, why, slow


def _loopback(addresses: list[str]) -> bool:
    return any(ipaddress.ip_address(address).is_loopback for address in addresses)


def _own_name(launch: LaunchInfo, found: Addresses, limit_s: float) -> list[Finding]:
    name, outward = socket.gethostname(), outward_address(found)
    line = f"'{outward or 'ADDRESS'} {name}'"
    addresses, why, findings = _look_up(name, "this host's own name", limit_s)
    if not addresses:
        text = f"this host's own name {name} does not resolve ({why})"
        return [*findings, Finding("warning", "names", text, f"add the line {line} to /etc/hosts", of_host=True)]
    text = f"this host's own name {name} resolves to {', '.join(addresses)}"
    if _loopback(addresses):
        if over_several_hosts(launch):
            text += ", which no other host can reach"
            remedy = f"in /etc/hosts, replace the line of {name} by {line}"
            return [*findings, Finding("warning", "names", text, remedy, of_host=True)]
        text += ": good on one host, of no use to others"
    elif not {address for own in found.values() for address in own} & set(addresses):
        text += ", none of which this host has"
        remedy = f"correct {name} in /etc/hosts or the name server; this host has {outward or 'no address'}"
        return [*findings, Finding("warning", "names", text, remedy, of_host=True)]
    return [*findings, Finding("ok", "names", text, of_host=True)]


def _master(launch: LaunchInfo, master: str, found: Addresses, limit_s: float) -> list[Finding]:
    source = launch.sources.get("master_addr", launch.launcher)
    addresses, why, findings = _look_up(master, "the master address", limit_s)
    if not addresses:
        text = f"the master address {master} ({source}) does not resolve on {socket.gethostname()} ({why})"
        remedy = "set MASTER_ADDR to a name or address of rank 0's host that every host can resolve"
        return [*findings, Finding("problem", "names", text, remedy, of_host=True)]
    text = f"the master address {master} ({source})"
    literal = False
    with contextlib.suppress(ValueError):
        literal = bool(ipaddress.ip_address(master))
    if not literal:
        text += f" resolves to {', '.join(addresses)}"
    if _loopback(addresses) and over_several_hosts(launch):
        # Where rank 0 runs a name may do so: it then listens on all addresses.
        harmless = launch.rank == 0 and not literal and master != "localhost"
        text += (
            ", a loopback address: rank 0 is found by other hosts only if they resolve it otherwise"
            if harmless
            else ", a loopback address: every host would look for rank 0 on itself"
        )
        outward = outward_address(found) if launch.rank == 0 else None
        remedy = f"set MASTER_ADDR to an address of rank 0's host{f', such as {outward}' if outward else ''}"
        if not literal:
            remedy += f", or correct {master} in /etc/hosts"
        return [*findings, Finding("warning" if harmless else "problem", "names", text, remedy, of_host=True)]
    return [*findings, Finding("ok", "names", text, of_host=True)]
