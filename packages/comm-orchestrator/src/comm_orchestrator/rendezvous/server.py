"""The listening socket of rank 0's store, on as few addresses as possible."""

from __future__ import annotations

import contextlib
import errno
import gc
import ipaddress
import os
import socket
from datetime import timedelta

import psutil
import torch
from torch.distributed import TCPStore
from torch.torch_version import TorchVersion

from comm_orchestrator.interfaces import numeric
from comm_orchestrator.rendezvous.dns import resolve
from comm_utils.errors import LaunchError
from comm_utils.host_identity import host_name

__all__ = ["PortInUseError", "listen", "serve", "serve_again", "serves", "who_listens"]

_NAMES_S = 2.0
# The kernel completes a connection of a host to itself in microseconds.
_TO_ITSELF_S = 5.0
# The inodes of listening sockets that stores have taken over, by descriptor. A store closes its own at its end, after
# which the descriptor is something else.
_listeners: dict[int, int] = {}
# Before, libuv's server did not take a socket that somebody else had opened; the older server does.
_LIBUV_TAKES_SOCKETS = TorchVersion(torch.__version__) >= "2.13"


class PortInUseError(LaunchError):
    """Rank 0 cannot listen where the others look for it, because ``pid`` does, where that can be known.

    ``closing``: nobody does any more.
    """

    def __init__(self, host: str, port: int) -> None:
        listens, self.pid, command = _owner(port, host)
        self.closing = not listens
        who = f" by pid {self.pid}, {command}" if self.pid is not None else ""
        super().__init__(f"port {port} of {host} is in use{who}")


def who_listens(port: int, host: str | None = None) -> str:
    """``"pid 12, python train.py"``; empty where that cannot be known, as for another user's process.

    Args:
        host: at an address of this host, or at all; None for any.
    """
    _, pid, command = _owner(port, host)
    return f"pid {pid}, {command}" if pid is not None else ""


def _owner(port: int, host: str | None) -> tuple[bool, int | None, str]:
    """Return whether somebody listens there, as far as that can be seen, and which process it is."""
    seen: tuple[bool, int | None, str] = False, None, ""
    try:
        own = {"0.0.0.0", "::"} | (_resolved(host) if host else set())
        if any(host is None or _plain(address) in own for address in _addresses_of_stores(port)):
            return True, os.getpid(), " ".join(psutil.Process().cmdline())[:120]  # a look at all processes takes long
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr
            if listens and listens.port == port and (host is None or _plain(listens.ip) in own):
                seen = True, None, ""
                if connection.pid:
                    return True, connection.pid, " ".join(psutil.Process(connection.pid).cmdline())[:120]
    except (psutil.Error, OSError):
        return True, None, ""
    return seen


def _resolved(host: str) -> set[str]:
    return {_plain(info[4][0]) for info in resolve(host, 0, _NAMES_S)}


def _plain(address: object) -> str:
    """Return an address without the interface of a link-local one, which the kernel's tables do not name."""
    return str(address).partition("%")[0]


def _addresses_of_stores(port: int) -> list[str]:
    """Return where stores of this process listen at ``port``."""
    found = []
    for descriptor, inode in list(_listeners.items()):
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                with socket.socket(fileno=os.dup(descriptor)) as listener:
                    address = listener.getsockname()
                found += [str(address[0])] if address[1] == port else []
    return found


def serves(port: int) -> bool:
    """Return True where this process has a store that listens at ``port``, at any address."""
    return bool(_addresses_of_stores(port))


def listen(host: str, port: int, alone: bool) -> socket.socket:
    """Return a listening socket for ``host``, no wider than it has to be.

    On the address itself where ``host`` is one or stands for exactly one of this machine that others can reach, or for
    any where all ranks are on this machine; on all otherwise, because other hosts may know ``host`` by another.

    Args:
        alone: all ranks run on this machine.

    Raises:
        PortInUseError: says by whom, where that can be known.
    """
    try:
        return _listen(host, port, alone)
    except PortInUseError:
        # An earlier attempt of this process holds it until its traceback is collected, as far as that is a cycle.
        gc.collect()
    return _listen(host, port, alone)


def _listen(host: str, port: int, alone: bool) -> socket.socket:
    try:
        address = _own_address(host, alone)
        if address is not None:
            try:
                family, *_, where = resolve(address, port, _NAMES_S)[0]  # with the interface of a link-local address
                return socket.create_server(where, family=family, backlog=4096)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:  # translated on the way, as a service's address is
                    raise
        if socket.has_dualstack_ipv6():
            try:
                return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise
        return socket.create_server(("", port), backlog=4096)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise LaunchError(f"rank 0 cannot listen at {host}:{port}: {error.strerror or error}") from error
        raise PortInUseError(host, port) from error


def _own_address(host: str, alone: bool) -> str | None:
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    try:
        found = {str(info[4][0]) for info in resolve(host, 0, _NAMES_S)}
    except socket.gaierror:
        return None
    v4 = sorted(address for address in found if ":" not in address)
    if alone:
        return (v4 or sorted(found))[0]
    return v4[0] if len(v4) == 1 == len(found) and not ipaddress.ip_address(v4[0]).is_loopback else None


def serve(listener: socket.socket, timeout: timedelta) -> TCPStore:
    """Return a store on ``listener``, which it takes over.

    Raises:
        LaunchError: this host cannot connect to itself, as where its loopback interface is down.
    """
    host, port = numeric(listener.getsockname()), listener.getsockname()[1]
    local = {"0.0.0.0": "127.0.0.1", "::": "localhost"}.get(host, host)
    try:  # torch's client would try again until the timeout
        socket.create_connection((local, port), timeout=_TO_ITSELF_S).close()
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"rank 0 listens at {local}:{port}, and its own connection to it fails: {error.strerror or error}; bring "
            f"up the loopback interface of {host_name()} (ip link set lo up), and let its firewall pass what "
            "it sends to itself"
        ) from error
    descriptor = listener.detach()
    _listeners[descriptor] = os.fstat(descriptor).st_ino
    return _server(local, port, timeout, descriptor)


def _leave_listeners_to_parent() -> None:
    """Let go of the listening sockets in a forked child, which would keep the port in use when the parent ends.

    Their numbers stay taken: a store that ends in the child closes them.
    """
    for descriptor, inode in _listeners.items():
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                nothing = os.open(os.devnull, os.O_RDWR)
                os.dup2(nothing, descriptor, inheritable=False)
                os.close(nothing)
    _listeners.clear()


os.register_at_fork(after_in_child=_leave_listeners_to_parent)


def serve_again(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Return the earlier store of this process at ``port``, if a group that is still referenced keeps it alive.

    Raises:
        RuntimeError: it is something else that this process has there.
    """
    return _server(host, port, timeout, None)


def _server(host: str, port: int, timeout: timedelta, listener: int | None) -> TCPStore:
    return TCPStore(
        host,
        port,
        None,
        True,
        timeout,
        wait_for_workers=False,
        multi_tenant=True,  # finds the server again, for serve_again
        master_listen_fd=listener,
        use_libuv=_LIBUV_TAKES_SOCKETS,
    )
