"""Network interfaces: which there are, which leads to the master, and whether the variables name real ones."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from typing import Any

from comm_orchestrator.interfaces import Addresses, interface_for, local_address_to, matching, variables
from comm_orchestrator.tools.doctor.finding import Finding, from_error
from comm_orchestrator.tools.doctor.launch import over_several_hosts
from comm_utils.errors import LaunchError
from comm_utils.launch import LaunchInfo

__all__ = ["as_table", "check", "leads_to"]

_EXACT = ("CCL_KVS_IFACE", "FI_TCP_IFACE")


def leads_to(host: str | None, found: Addresses) -> str | None:
    """The interface on the way to ``host``; None where there is none, or nowhere to go."""
    return interface_for(local_address_to(host), found) if host is not None else None


def as_table(master: str | None, found: Addresses) -> list[dict[str, Any]]:
    """Every interface that is up."""
    chosen = leads_to(master, found)
    return [
        {"name": name, "addresses": list(own), "leads_to_master": name == chosen} for name, own in sorted(found.items())
    ]


def check(
    launch: LaunchInfo, master: str | None, environ: Mapping[str, str], found: Addresses, nccl: bool
) -> list[Finding]:
    """Whether there is a way to the others, and whether the variables allow it.

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
        text = f"no interface of {socket.gethostname()} leads to the master {master}; up: {_listed(found)}"
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
        text = (
            f"NCCL_SOCKET_IFNAME={pattern!r} means none of the interfaces of {socket.gethostname()}: {_listed(found)}"
        )
        one = Finding("problem" if nccl else "warning", "interfaces", text)
        findings.append(_with_remedy(one, "NCCL_SOCKET_IFNAME", found))
    for name in _EXACT:
        if name in environ and environ[name] not in found:
            text = f"{name}={environ[name]!r} is none of the interfaces of {socket.gethostname()}: {_listed(found)}"
            findings.append(_with_remedy(Finding("warning", "interfaces", text), name, found))
    return findings


def _with_remedy(finding: Finding, variable: str, found: Addresses) -> Finding:
    names = ", ".join(sorted(name for name, own in found.items() if own))
    return Finding(
        finding.level, finding.check, finding.found, f"unset {variable}, or set it to one of {names}", of_host=True
    )


def _listed(found: Addresses) -> str:
    return ", ".join(f"{name} ({', '.join(own)})" for name, own in sorted(found.items()) if own) or "none"
