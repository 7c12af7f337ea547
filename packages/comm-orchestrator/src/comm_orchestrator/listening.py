"""The address where rank 0 lets the others meet: listening there, and getting there."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch.distributed import TCPStore
from torch.torch_version import TorchVersion

from comm_orchestrator.meeting import Deadline
from comm_utils.errors import CommTimeoutError, LaunchError

__all__ = [
    "ConnectionEndedError",
    "PortInUseError",
    "connect",
    "leads_here",
    "listen",
    "reach",
    "serve",
    "serve_again",
    "who_listens",
    "with_limit",
]

# A name that does not resolve may still come, as that of a pod does; not for longer than this.
_RESOLVING_S = 300.0
_SILENCE_S = 20.0
_NAMES_S = 2.0
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


class ConnectionEndedError(CommTimeoutError):
    """Whoever listens there has hung up: no store, or one that is just being closed."""


def who_listens(port: int, host: str | None = None) -> str:
    """``"pid 12, python train.py"``; empty where that cannot be known, as for another user's process.

    Args:
        host: at an address of this host, or at all; None for any.
    """
    _, pid, command = _owner(port, host)
    return f"pid {pid}, {command}" if pid is not None else ""


def _owner(port: int, host: str | None) -> tuple[bool, int | None, str]:
    """Whether somebody listens there, as far as that can be seen, and which process it is."""
    seen: tuple[bool, int | None, str] = False, None, ""
    try:
        own = {"0.0.0.0", "::"} | ({str(info[4][0]) for info in _resolve(host, port, _NAMES_S)} if host else set())
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr
            if listens and listens.port == port and (host is None or listens.ip in own):
                seen = True, None, ""
                if connection.pid:
                    return True, connection.pid, " ".join(psutil.Process(connection.pid).cmdline())[:120]
    except (psutil.Error, OSError):
        return True, None, ""
    return seen


def listen(host: str, port: int, alone: bool) -> socket.socket:
    """A listening socket for ``host``, no wider than it has to be.

    On the address itself where ``host`` is one or stands for exactly one of this machine that others can reach, or for
    any where all ranks are on this machine; on all otherwise, because other hosts may know ``host`` by another.

    Args:
        alone: all ranks run on this machine.

    Raises:
        PortInUseError: says by whom, where that can be known.
    """
    try:
        address = _own_address(host, alone)
        if address is not None:
            try:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                return socket.create_server((address, port), family=family, backlog=4096)
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
        found = {str(info[4][0]) for info in _resolve(host, 0, _NAMES_S)}
    except socket.gaierror:
        return None
    v4 = sorted(address for address in found if ":" not in address)
    if alone:
        return (v4 or sorted(found))[0]
    return v4[0] if len(v4) == 1 == len(found) and not ipaddress.ip_address(v4[0]).is_loopback else None


def serve(listener: socket.socket, timeout: timedelta) -> TCPStore:
    """A store on ``listener``, which it takes over."""
    host, port = listener.getsockname()[:2]
    local = {"0.0.0.0": "127.0.0.1", "::": "localhost"}.get(host, host)
    return _server(local, port, timeout, listener.detach())


def serve_again(host: str, port: int, timeout: timedelta) -> TCPStore:
    """The store that this process has made at ``port`` before, which a group that somebody still holds keeps alive.

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


def reach(host: str, port: int, deadline: Deadline, source: str) -> str:
    """Wait until somebody listens at ``host``; return this machine's address on the way there.

    torch would do the same, with a page of C++ stack frames for every try.

    Raises:
        LaunchError: ``host`` does not resolve.
        CommTimeoutError: nobody answers; says what happened at the last try.
    """
    where = f"{host}:{port} ({source})"
    problem = ""

    def waiting() -> str:
        return f"for rank 0 at {where}, which {problem}"

    while True:
        resolved = False
        try:
            infos = _resolve(host, port, max(0.1, deadline.left_s()))
            resolved = True
            for family, kind, protocol, _, address in infos:
                with socket.socket(family, kind, protocol) as sock:
                    sock.settimeout(max(0.05, min(3.0, deadline.left_s())))
                    try:
                        sock.connect(address)
                        return str(sock.getsockname()[0])
                    except TimeoutError:
                        problem = "does not answer"
                    except OSError as error:
                        problem = _REASONS.get(error.errno or 0, str(error.strerror or error))
        except socket.gaierror as error:
            problem = f"does not resolve on {socket.gethostname()} ({error.strerror})"
        late = not resolved and deadline.elapsed_s() > _RESOLVING_S
        if late or not deadline.pause(waiting):
            break
    waited = f"{deadline.elapsed_s():.3g} s"
    if not resolved:
        raise LaunchError(
            f"the master address {host!r} ({source}) {problem}, for {waited}; set MASTER_ADDR to a name or address of "
            "rank 0's host that every host can resolve"
        )
    raise CommTimeoutError(
        f"rank 0 is not to be found at {where}, which {problem}, for {waited}; check that rank 0 was started, that it "
        f"runs on {host}, and that no firewall is between"
    )


_REASONS = {
    errno.ECONNREFUSED: "refuses connections",
    errno.EHOSTUNREACH: "has no route to it",
    errno.ENETUNREACH: "is in a network that cannot be reached",
}


def leads_here(host: str, port: int) -> str:
    """Why others may look for rank 0 in vain at ``host``, as far as that shows on rank 0's host; else empty."""
    try:
        for *_, address in _resolve(host, port, 0.5):
            with contextlib.suppress(OSError), socket.create_connection(address[:2], timeout=0.25):
                return ""
        with socket.create_connection((host, port), timeout=0.25):
            return ""
    except socket.gaierror as error:
        own = socket.gethostname()
        return f"the master address {host!r} does not resolve on {own} ({error.strerror}), where rank 0 runs"
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, str(error.strerror or error))
        own = socket.gethostname()
        return f"rank 0 runs on {own}, but {host}:{port}, where the others look for it, {reason} from there"


def connect(host: str, port: int, deadline: Deadline, timeout: timedelta) -> TCPStore:
    """A client of the store at ``host``, where somebody listens.

    Raises:
        CommTimeoutError: whoever listens there is not a store.
    """
    # The constructor waits for an answer without a limit; a thread can be left behind.
    limit_s = max(0.2, min(deadline.left_s(), _SILENCE_S))
    outcome = with_limit(
        lambda: TCPStore(host, port, None, False, min(timeout, timedelta(seconds=limit_s)), wait_for_workers=False),
        limit_s,
    )
    if isinstance(outcome, TCPStore):
        outcome.set_timeout(timeout)
        return outcome
    who = who_listens(port, host) if _own(host) else ""
    reason = f": {str(outcome).splitlines()[0]}" if outcome is not None else ""
    kind = CommTimeoutError if outcome is None else ConnectionEndedError
    raise kind(
        f"{host}:{port} accepts connections but does not answer like a store of torch.distributed{reason}; "
        f"{f'there listens {who}; ' if who else ''}set MASTER_PORT to a free port"
    )


def _own(host: str) -> bool:
    try:
        with socket.create_server((socket.gethostbyname(host), 0)):
            return True
    except OSError:
        return False


def _resolve(host: str, port: int, limit_s: float) -> list[Any]:
    """``getaddrinfo``, which can take as long as it likes, within ``limit_s``."""
    found = with_limit(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), limit_s)
    if isinstance(found, BaseException):
        try:
            raise found
        finally:
            del found
    if found is None:
        raise socket.gaierror(socket.EAI_AGAIN, f"no answer from the name service within {limit_s:.3g} s")
    return list(found)


def with_limit(call: Callable[[], Any], limit_s: float) -> Any:
    """What ``call`` returns or raises; None where that takes longer."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="comm-connect", daemon=True)
    thread.start()
    thread.join(limit_s)
    # Taken out: an error in the list would keep itself alive, and with it every socket of its frames.
    return outcome.pop() if outcome else None
