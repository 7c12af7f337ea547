"""Check the network that the ranks share: host names, the port of the store, and interfaces."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Mapping
from typing import Any

from comm_orchestrator.interfaces import (
    Addresses,
    interface_for,
    local_address_to,
    matching,
    outward_address,
    variables,
)
from comm_orchestrator.rendezvous.server import who_listens
from comm_orchestrator.tools.doctor.finding import Finding, from_error
from comm_orchestrator.tools.doctor.launch import over_several_hosts
from comm_orchestrator.tools.doctor.time_limit import within
from comm_utils.errors import LaunchError
from comm_utils.host_identity import host_name
from comm_utils.launch import LaunchInfo

__all__ = ["check_host_names", "check_interfaces", "check_port", "interface_rows", "leads_to", "resolve"]

_SLOW_LOOKUP_S = 1.0


def resolve(name: str) -> list[str]:
    """Return the addresses of a host, IPv4 first.

    Raises:
        OSError: it has none.
    """
    found = {str(info[4][0]).split("%")[0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    return sorted(found, key=lambda address: (":" in address, address))


def check_host_names(launch: LaunchInfo, found: Addresses, limit_s: float) -> list[Finding]:
    """Look up this host's own name, and the master address."""
    findings = _own_name(launch, found, limit_s)
    if launch.master_addr is not None:
        findings += _master(launch, launch.master_addr, found, limit_s)
    return findings


def _look_up(name: str, what: str, limit_s: float) -> tuple[list[str], str, list[Finding]]:
    """Return addresses, why there are none, and a finding where that took long."""
    start = time.monotonic()
    addresses, why = [], ""
    try:
        addresses = within(limit_s, lambda: resolve(name), f"looking up {name}")
    except (OSError, UnicodeError) as error:  # a name that cannot be looked up in time, or is none
        why = str(getattr(error, "strerror", None) or error)
    took_s = time.monotonic() - start
    slow = []
    if took_s > _SLOW_LOOKUP_S:
        text = f"looking up {what} {name} took {took_s:.1f} s"
        slow = [Finding("warning", "names", text, "check the name servers in /etc/resolv.conf", of_host=True)]
    return addresses, why, slow


def _loopback(addresses: list[str]) -> bool:
    return any(ipaddress.ip_address(address).is_loopback for address in addresses)


def _own_name(launch: LaunchInfo, found: Addresses, limit_s: float) -> list[Finding]:
    name, outward = host_name(), outward_address(found)
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
        text = f"the master address {master} ({source}) does not resolve on {host_name()} ({why})"
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


_PORT_REMEDY = "set MASTER_PORT (or COMM_LAUNCH__MASTER_PORT) to a free port, the same on every rank"


def check_port(launch: LaunchInfo, environ: Mapping[str, str], default_port: int) -> list[Finding]:
    """Return the master port; nothing on other ranks than 0, who do not listen."""
    if launch.rank != 0:
        return []
    port = default_port if launch.master_port is None else launch.master_port
    if port == 0:
        return []
    host = launch.master_addr or "127.0.0.1"
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        who = who_listens(port)
        return [Finding("ok", "port", f"port {port} of {host} is held by torchrun's agent{f' ({who})' if who else ''}")]
    taken = [address for address in _addresses(host) if _is_taken(address, port)]
    if not taken:
        return [Finding("ok", "port", f"port {port} of {host}, where rank 0 is to listen, is free")]
    who = who_listens(port)
    text = f"port {port} of {host}, where rank 0 is to listen, is in use" + (f" by {who}" if who else "")
    # One process alone needs no port; the next launch from here might.
    needs_port = launch.world_size > 1 and launch.master_addr is not None
    return [Finding("problem" if needs_port else "warning", "port", text, _PORT_REMEDY)]


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []  # said elsewhere
    return sorted({(family, str(address[0])) for family, _, _, _, address in infos})


def _is_taken(where: tuple[socket.AddressFamily, str], port: int) -> bool:
    """Binds without listening: a rank that is ahead of this one must not take the probe for rank 0."""
    family, address = where
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


_EXACT = ("CCL_KVS_IFACE", "FI_TCP_IFACE")


def leads_to(host: str | None, found: Addresses) -> str | None:
    """Return the interface on the way to ``host``; None where there is none, or nowhere to go."""
    return interface_for(local_address_to(host), found) if host is not None else None


def interface_rows(master: str | None, found: Addresses) -> list[dict[str, Any]]:
    """Return every interface that is up."""
    chosen = leads_to(master, found)
    return [
        {"name": name, "addresses": list(own), "leads_to_master": name == chosen} for name, own in sorted(found.items())
    ]


def check_interfaces(
    launch: LaunchInfo, master: str | None, environ: Mapping[str, str], found: Addresses, nccl: bool
) -> list[Finding]:
    """Return whether there is a way to the others, and whether the variables allow it.

    Args:
        master: its address; None where nobody knows one that can be looked up.
        environ: with the configuration applied.
        nccl: it can be used here.
    """
    findings = _named(environ, found, nccl)
    if not over_several_hosts(launch) or master is None:
        return findings or [Finding("ok", "interfaces", f"up: {_listed(found)}", of_host=True)]
    chosen = leads_to(master, found)
    if chosen is None:
        text = f"no interface of {host_name()} leads to the master {master}; up: {_listed(found)}"
        remedy = "bring one up (ip link set NAME up, ip route), or set MASTER_ADDR to an address that can be reached"
        return [*findings, Finding("problem", "interfaces", text, remedy, of_host=True)]
    if all(ipaddress.ip_address(address).is_loopback for address in found[chosen]):
        return findings  # what is wrong with the name is said elsewhere
    text = f"{chosen} ({', '.join(found[chosen])}) leads to the master {master}"
    return [*findings, Finding("ok", "interfaces", text, of_host=True)]


def _named(environ: Mapping[str, str], found: Addresses, nccl: bool) -> list[Finding]:
    findings = []
    try:
        variables(environ, None, found, ccl=False)
    except LaunchError as error:
        findings.append(_with_remedy(from_error("interfaces", error), "GLOO_SOCKET_IFNAME", found))
    pattern = environ.get("NCCL_SOCKET_IFNAME")
    if pattern is not None and not any(found[name] for name in matching(pattern, found)):
        text = f"NCCL_SOCKET_IFNAME={pattern!r} means none of the interfaces of {host_name()}: {_listed(found)}"
        one = Finding("problem" if nccl else "warning", "interfaces", text)
        findings.append(_with_remedy(one, "NCCL_SOCKET_IFNAME", found))
    for name in _EXACT:
        if name in environ and environ[name] not in found:
            text = f"{name}={environ[name]!r} is none of the interfaces of {host_name()}: {_listed(found)}"
            findings.append(_with_remedy(Finding("warning", "interfaces", text), name, found))
    return findings


def _with_remedy(finding: Finding, variable: str, found: Addresses) -> Finding:
    names = ", ".join(sorted(name for name, own in found.items() if own))
    return Finding(
        finding.level, finding.check, finding.found, f"unset {variable}, or set it to one of {names}", of_host=True
    )


def _listed(found: Addresses) -> str:
    return ", ".join(f"{name} ({', '.join(own)})" for name, own in sorted(found.items()) if own) or "none"
