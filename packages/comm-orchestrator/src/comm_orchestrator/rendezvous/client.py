"""Connections of the other ranks to the store server of rank 0."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import struct
import sys
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

from comm_orchestrator.interfaces import numeric
from comm_orchestrator.rendezvous.dns import ask_briefly, resolve
from comm_orchestrator.rendezvous.protocol import Deadline
from comm_orchestrator.rendezvous.server import who_listens
from comm_utils.errors import CommTimeoutError, LaunchError
from comm_utils.host_identity import host_name
from comm_utils.threads import with_limit

__all__ = [
    "ConnectionEndedError",
    "NoStoreError",
    "connect",
    "explained",
    "unreachable_reason",
    "wait_for_listener",
]

# A name that does not resolve may still come, as that of a pod does; not for longer than this.
_RESOLVING_S = 300.0
_SILENCE_S = 20.0
# A name may have several addresses, of which the first may lead nowhere.
_ADDRESS_S = 3.0
_OWN_S = 2.0
# A store that has ended since it answered refuses torch's client, which tries again for so long or longer.
_CONNECTING_S = 2.0
# What torch's own client says first: validate with this number, then ping with a number that comes back.
# Source: torch/csrc/distributed/c10d/TCPStoreBackend.hpp, the same from torch 2.6 to 2.15.
_HELLO = struct.Struct("=BIBI")
_VALIDATE, _MAGIC, _PING = 0, 0x3C85F7CE, 13


class ConnectionEndedError(CommTimeoutError):
    """The server closed the connection: perhaps a store that is just being closed, or a proxy without one behind it."""


class NoStoreError(ConnectionEndedError):
    """The server answered as no store does."""


def wait_for_listener(
    host: str,
    port: int,
    deadline: Deadline,
    source: str,
    while_refused: Callable[[], None] | None = None,
    server: str = "rank 0",
) -> str:
    """Wait until somebody listens at ``host``; return this machine's address on the way there.

    torch would do the same, with a page of C++ stack frames for every try.

    Args:
        while_refused: called as long as nobody listens; raises a CommError where nobody can.
        server: whose store it is, for messages.

    Raises:
        LaunchError: ``host`` does not resolve.
        CommTimeoutError: nobody answers; says what happened at the last try.
    """
    where = f"{host}:{port} ({source})"
    problem = ""

    def waiting() -> str:
        return f"for {server} at {where}, which {problem}"

    while True:
        resolved = False
        try:
            infos = resolve(host, port, max(0.1, deadline.left_s()))
            resolved = True
            for family, kind, protocol, _, address in infos:
                with socket.socket(family, kind, protocol) as sock:
                    sock.settimeout(max(0.05, min(_ADDRESS_S, deadline.left_s())))
                    try:
                        sock.connect(address)
                        return str(sock.getsockname()[0])
                    except TimeoutError:
                        problem = "does not answer"
                    except OSError as error:
                        problem = _REASONS.get(error.errno or 0, str(error.strerror or error))
                        if while_refused is not None and error.errno == errno.ECONNREFUSED:
                            while_refused()
        except socket.gaierror as error:
            problem = f"does not resolve on {host_name()} ({error.strerror})"
        late = not resolved and deadline.elapsed_s() > _RESOLVING_S
        if late or not deadline.pause(waiting):
            break
    waited = f"{deadline.elapsed_s():.3g} s"
    if not resolved:
        raise LaunchError(
            f"the master address {host!r} ({source}) {problem}, for {waited}; set MASTER_ADDR to a name or address of "
            f"the host of {server} that every host can resolve"
        )
    raise CommTimeoutError(
        f"{server} is not to be found at {where}, which {problem}, for {waited}; check that {server} was "
        f"started, that it runs on {host}, and that no firewall is between"
    )


_SILENT = "says nothing"
_HANGS_UP = "hangs up"
_ANSWERS = "answers with"
_REASONS = {
    errno.ECONNRESET: _HANGS_UP,
    errno.EPIPE: _HANGS_UP,
    errno.ECONNREFUSED: "refuses connections",
    errno.EHOSTUNREACH: "has no route to it",
    errno.ENETUNREACH: "is in a network that cannot be reached",
}


def unreachable_reason(host: str, port: int) -> str:
    """Return why others may look for rank 0 in vain at ``host``, as far as that shows on rank 0's host; else empty."""
    own = host_name()
    reason = ""
    try:
        for *_, address in resolve(host, port, 0.5):
            reason, _ = _greet(numeric(address), port, 0.25)
            if not reason or not _known():
                return ""
    except socket.gaierror as error:
        return f"the master address {host!r} does not resolve on {own} ({error.strerror}), where rank 0 runs"
    return f"rank 0 runs on {own}, but {host}:{port}, where the others look for it, {reason} from there"


def _greet(host: str, port: int, limit_s: float) -> tuple[str, str]:
    """Ask the server at ``host`` whether it is a store; return what is wrong, or empty, and its address.

    torch's own client asks as well, but it waits for an answer without a limit, in C++ that ends the process if the
    interpreter ends meanwhile, and prints a page of stack frames for every wrong answer.
    """
    number, address = os.urandom(4), ""
    try:
        with _connected(host, port, limit_s) as sock:
            address = numeric(sock.getpeername())
            sock.sendall(_HELLO.pack(_VALIDATE, _MAGIC, _PING, int.from_bytes(number, sys.byteorder)))
            answer = b""
            while len(answer) < len(number) and (more := sock.recv(len(number) - len(answer))):
                answer += more
    except TimeoutError:
        return _SILENT, address
    except OSError as error:
        return _REASONS.get(error.errno or 0, str(error.strerror or error)), address
    if answer == number:
        return "", address
    return f"{_ANSWERS} {answer!r}" if answer else _HANGS_UP, address


def _connected(host: str, port: int, limit_s: float) -> socket.socket:
    """Return a connection to the first address of ``host`` at which somebody listens."""
    end = Deadline(limit_s)
    failure = OSError(f"{host} has no address")
    found = resolve(host, port, limit_s)
    for others, (family, kind, protocol, _, address) in zip(range(len(found) - 1, -1, -1), found, strict=True):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(max(0.05, min(_ADDRESS_S, end.left_s()) if others else end.left_s()))
            sock.connect(address)
            sock.settimeout(max(0.05, end.left_s()))
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise failure


@functools.cache
def _known() -> bool:
    """Return whether this torch's stores answer as :func:`_greet` expects; asked only where one did not."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    return not _greet("127.0.0.1", store.port, 5.0)[0]


def connect(host: str, port: int, deadline: Deadline, timeout: timedelta, explain: bool = True) -> TCPStore:
    """Return a client of the store at ``host``, where somebody listens.

    Args:
        explain: False for a caller that tries again: a ``ConnectionEndedError`` says what the server did, and no more.

    Raises:
        CommTimeoutError: the server there says nothing.
        ConnectionEndedError: it ends the connection.
        NoStoreError: it is not a store.
    """
    limit = Deadline(max(0.2, min(deadline.left_s(), _SILENCE_S)))
    while True:
        left_s = max(0.1, limit.left_s())
        reason, address = _greet(host, port, left_s)
        if reason and _known():
            break
        made = _client(address or host, port, left_s)
        if isinstance(made, TCPStore):
            made.set_timeout(timeout)
            return made
        reason = _greet(host, port, _OWN_S)[0] or (_SILENT if made is None else str(made).splitlines()[0])
        if made is None or deadline.interruption or not limit.pause(None):
            break
    if reason == _SILENT:
        raise CommTimeoutError(explained(host, port, reason))
    if reason.startswith(_ANSWERS):
        raise NoStoreError(explained(host, port, reason))
    raise ConnectionEndedError(explained(host, port, reason) if explain else reason)


def _client(address: str, port: int, limit_s: float) -> TCPStore | Exception | None:
    """Return torch's client of the store that has just answered there, or its error; None where it takes too long."""

    def make() -> TCPStore:
        ask_briefly()
        connecting = timedelta(seconds=min(limit_s / 2, _CONNECTING_S))
        return TCPStore(address, port, None, False, connecting, wait_for_workers=False)

    # In a thread that can be left behind; a rank that lacks threads reports that here.
    made: TCPStore | Exception | None = with_limit(make, limit_s, needs_thread=False)
    return made


def explained(host: str, port: int, reason: str) -> str:
    """Return what to do about a server at ``host`` that is no store; it takes a look at all processes."""
    if reason == _REASONS[errno.ECONNREFUSED]:
        return (
            f"the store at {host}:{port} has ended: it answered, and now it {reason}; see what rank 0, or another "
            "process that serves it, printed before it ended"
        )
    own = _own(host)
    who = who_listens(port, host) if own else ""
    remedy = (
        "see whether that process is stopped, or set MASTER_PORT to a free port"
        if own and reason == _SILENT
        else "set MASTER_PORT to a free port"
        if own
        else "check that MASTER_ADDR is the host of rank 0 and MASTER_PORT a port that is free there"
    )
    return (
        f"{host}:{port} accepts connections but does not answer like a store of torch.distributed: it {reason}; "
        f"{f'there listens {who}; ' if who else ''}{remedy}"
    )


def _own(host: str) -> bool:
    with contextlib.suppress(OSError):
        for family, *_, address in resolve(host, 0, _OWN_S):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.bind(address)
                return True
    return False
