"""Whether rank 0 can listen where the others will look for it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from comm_orchestrator.rendezvous.server import who_listens
from comm_orchestrator.tools.doctor.finding import Finding
from comm_utils.launch import LaunchInfo

__all__ = ["check"]

_REMEDY = "set MASTER_PORT (or COMM_LAUNCH__MASTER_PORT) to a free port, the same on every rank"


def check(launch: LaunchInfo, environ: Mapping[str, str], default_port: int) -> list[Finding]:
    """The master port; nothing on other ranks than 0, who do not listen."""
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
    return [Finding("problem" if launch.master_addr is not None else "warning", "port", text, _REMEDY)]


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
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
