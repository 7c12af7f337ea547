"""The words by which a store says whose it is, and how a rank checks them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.distributed import Store

from comm_config.secret import SECRET_VARIABLE
from comm_orchestrator.rendezvous.authentication import Seal, can_share_secrets, file_secret
from comm_orchestrator.rendezvous.protocol import Deadline
from comm_utils.errors import LaunchError
from comm_utils.host_identity import host_name

__all__ = [
    "FREE_PORT",
    "GREETING",
    "authenticated",
    "leave_refusal_hint",
    "read_greeting",
    "refusal_hint",
    "scope_of",
]

FREE_PORT = "set MASTER_PORT (or distributed_port) to a free port, the same on every rank"
GREETING = "comm/server"
_MOST_GREETING_BYTES = 4096
_REFUSED = "refused"
# How long rank 0 may take from its store's first answer to its own first word there. Its client asks the name service
# for the name of its address before, which takes 30 s where three name servers are silent.
_SILENT_S = 40.0


def scope_of(port: int) -> str:
    """Return the scope in which the greeting of a store is signed."""
    return f"store at port {port}"


def read_greeting(store: Store, deadline: Deadline, where: str = "") -> dict[str, Any] | None:
    """Read what the server of a store says about itself, not authenticated yet; None where it says nothing in time.

    Args:
        where: the store is, for the log.

    Raises:
        LaunchError: it is malformed.
    """
    limit = Deadline(min(_SILENT_S, max(0.0, deadline.left_s())))
    while not store.check([GREETING]):
        if not limit.pause(lambda: f"for rank 0 to write to the store at {where}, which answers"):
            return None
    found = Seal().check(GREETING, store.get(GREETING), _MOST_GREETING_BYTES)
    well_formed = (
        isinstance(found, dict)
        and all(isinstance(found.get(name), str) for name in ("id", "host", "secret"))
        and type(found.get("pid")) is int
        and type(found.get("ended", False)) is bool
        and isinstance(found.get("job", 0), str | None)
    )
    if not well_formed:
        raise LaunchError(f"the store says {found!r:.60} about itself, which no rank 0 writes; {FREE_PORT}")
    greeting: dict[str, Any] = found
    return greeting


def authenticated(
    store: Store, server: Mapping[str, Any], address: str, scope: str, one_host: bool, secret: bytes | None
) -> Seal:
    """Check that rank 0 of this job made the store; return the seal of its records.

    Args:
        one_host: all ranks run on this host.

    Raises:
        LaunchError: another program made it, or rank 0 has another secret.
    """
    claimed = f"pid {server['pid']} on {server['host']:.60}, as it says"
    if secret is None and server["secret"] == "environment":
        raise LaunchError(
            f"rank 0 ({claimed}) has {SECRET_VARIABLE} in its environment, and this rank has not; set it to the same "
            "text on every rank"
        )
    if secret is None and (server["secret"] == "file" or one_host):
        secret = file_secret(server["id"])
        if secret is None and (server["secret"] == "file" or can_share_secrets()):
            raise LaunchError(
                f"the store at {address} ({claimed}) is not that of rank 0 of this job: it shares no secret with this "
                f"user (uid {os.getuid()}) on {host_name()}; set MASTER_PORT (or distributed_port) to a free "
                f"port, or, where the ranks have different users or files, {SECRET_VARIABLE} to the same random text "
                "on every rank"
            )
    seal = Seal(secret, scope)
    try:
        seal.check(GREETING, store.get(GREETING), _MOST_GREETING_BYTES)
    except LaunchError as error:
        if server["secret"] == "environment":
            raise LaunchError(
                f"rank 0 ({claimed}) has another {SECRET_VARIABLE} than this rank; set it to the same text on every "
                f"rank, or, where the store at {address} is another program's, {FREE_PORT}"
            ) from None
        raise LaunchError(f"the store at {address} ({claimed}) is not that of rank 0 of this job: {error}") from None
    return seal.scoped(server["id"])


def leave_refusal_hint(world: Store) -> None:
    """Let rank 0 know that this rank has another secret, which authenticates nothing."""
    world.set(_REFUSED, host_name())


def refusal_hint(world: Store) -> str:
    """Return what a rank with another secret has left for rank 0; empty where none has."""
    if not world.check([_REFUSED]):
        return ""
    host = world.get(_REFUSED)[:60].decode(errors="replace")
    return f"a rank on {host!r} says that its {SECRET_VARIABLE} is not that of rank 0: set the same text on every rank"
