"""Open the key-value store in which the ranks meet, and authenticate it."""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed import HashStore, PrefixStore, Store, TCPStore, rendezvous

import comm_config
from comm_orchestrator.rendezvous import file_store
from comm_orchestrator.rendezvous.authentication import (
    RoomCheck,
    Seal,
    environment_secret,
    keeps_secrets,
    share_secret,
)
from comm_orchestrator.rendezvous.client import (
    ConnectionEndedError,
    NoStoreError,
    connect,
    explained,
    unreachable_reason,
    wait_for_listener,
)
from comm_orchestrator.rendezvous.greeting import (
    FREE_PORT,
    GREETING,
    authenticated,
    leave_refusal_hint,
    read_greeting,
    refusal_hint,
    scope_of,
)
from comm_orchestrator.rendezvous.init_method import parsed
from comm_orchestrator.rendezvous.protocol import MOST_RECORD_BYTES, Deadline, RendezvousPoint
from comm_orchestrator.rendezvous.server import PortInUseError, listen, serve, serve_again, serves
from comm_utils.errors import ArgumentTypeError, CommTimeoutError, LaunchError
from comm_utils.host_identity import host_name
from comm_utils.launch import LaunchInfo

__all__ = ["open_store"]

# How long the last store of this process, or of the one before it, may take to leave its port.
_CLOSING_S = 3.0
# In the store of torchrun's agent: how often each rank was restarted.
_RESTARTS = "comm/restarts"
# On a machine whose cores are all taken a single attempt may last longer than that.
_CLOSING_ATTEMPTS = 20


@dataclass(frozen=True)
class _Address:
    host: str
    port: int
    source: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port} ({self.source})"


class _Process:
    """The earlier stores of this process: the servers of those that it joined, and each rendezvous that failed.

    The key of a rendezvous identifies its store; the store itself is kept so that its id stays its own.
    """

    servers: ClassVar[set[str]] = set()
    failed: ClassVar[dict[object, tuple[object, int]]] = {}


def open_store(
    launch: LaunchInfo,
    settings: comm_config.Settings,
    limit: timedelta,
    deadline: Deadline,
    store: Store | None,
) -> RendezvousPoint:
    """Open a store that all ranks of ``launch`` share and no earlier rendezvous has used.

    Args:
        settings: ``process_group.init_method`` overrides the launcher's address.
        limit: of the store's own operations.
        deadline: until when rank 0 is looked for.
        store: one that the caller made; used instead.

    Raises:
        LaunchError: no address, one that cannot be used, or a store of another program.
        CommTimeoutError: nobody answers there.
    """
    if not (store is None or isinstance(store, Store)):
        raise ArgumentTypeError(f"init_distributed: store: got {store!r:.60}; expected a torch.distributed.Store")
    secret = environment_secret(os.environ) if launch.world_size > 1 else None
    if store is not None:
        point = _persistent(store, id(store), None, "in a store (argument store)", lambda _: secret)
        return replace(point, renewal="pass a store that no earlier start has used")
    init_method = settings.process_group.init_method
    url, url_port = parsed(init_method or "env://")
    source = settings.sources.get("process_group.init_method", "")
    if url.scheme == "file":
        if url.netloc not in ("", "localhost"):  # as of file://tmp/meet, of which torch takes /meet
            raise LaunchError(
                f"init_distributed: init_method: got {init_method!r}, a file of the host {url.netloc!r}; expected "
                f"file:///path, such as 'file:///{url.netloc}{url.path}'"
            )
        if not url.path and launch.world_size == 1:
            return RendezvousPoint(HashStore(), hosted=True)
        if not url.path:
            of_job, path = file_store.store_of_job(launch, os.environ, limit)
            return _persistent(of_job, str(path), None, f"in {path} ({source})", lambda _: secret)
        file_store.check_private(Path(url.path))
    if url.scheme not in ("env", "tcp"):
        own = _torchs_own(str(init_method), launch, limit)
        point = _persistent(own, init_method, None, f"at {init_method} ({source})", lambda _: secret)
        return replace(point, renewal=f"remove {url.path} and start again" if url.scheme == "file" else "")
    if url.scheme == "tcp":
        if url.hostname is None or url.query or url_port is None:
            raise LaunchError(
                f"init_distributed: init_method: got {init_method!r}; expected tcp://host:port, with rank and "
                "world_size as arguments of init_distributed"
            )
        address = _Address(url.hostname, url_port, f"init_method, {source}")
    elif launch.world_size == 1 and (init_method is None or launch.master_addr is None):
        # Several processes with one MASTER_PORT, as torchrun's, may each be a world.
        return RendezvousPoint(HashStore(), hosted=True)
    else:
        address = _masters(launch, settings.launch.master_port)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return _agents(address, launch, limit, deadline, secret)
    if launch.world_size > 1 and address.port == 0:
        raise LaunchError(
            f"init_distributed: port: got 0, which each of {launch.world_size} ranks would choose for itself; "
            f"{FREE_PORT}"
        )
    if launch.rank == 0:
        try:
            return _host(address, launch, limit, secret)
        except PortInUseError as error:
            return _in_anothers(address, launch, limit, secret, error)
    return _join(address, launch, limit, deadline, secret)


def _masters(launch: LaunchInfo, default_port: int) -> _Address:
    if launch.master_addr is None:
        raise LaunchError(
            f"init_distributed: {launch.world_size} ranks were announced "
            f"({launch.sources.get('world_size', launch.launcher)}) but not where they meet; set MASTER_ADDR to the "
            "host of rank 0 (and MASTER_PORT), or pass init_method='tcp://host:port'"
        )
    port = default_port if launch.master_port is None else launch.master_port
    host = launch.master_addr
    if host.startswith("[") and host.endswith("]"):  # an IPv6 address as in a URL, which no resolver knows
        host = host[1:-1]
    return _Address(host, port, launch.sources.get("master_addr", launch.launcher))


def _torchs_own(url: str, launch: LaunchInfo, limit: timedelta) -> Store:
    try:
        store: Store = next(rendezvous(url, launch.rank, launch.world_size, timeout=limit))[0]
    except (RuntimeError, ValueError, OSError) as error:
        unknown = "No rendezvous handler" in str(error)
        expected = "; expected env://, tcp://host:port or file:///path" if unknown else ""
        raise LaunchError(
            f"init_distributed: rank {launch.rank} of {launch.world_size} cannot meet the others at {url}: {error}"
            f"{expected}"
        ) from error
    return store


def _persistent(
    store: Store, key: object, address: str | None, description: str, secret: Callable[[int], bytes | None]
) -> RendezvousPoint:
    """Use a store that may outlive a world, with a number for every rendezvous in it.

    The store counts those that succeeded. One that failed stays open, so that late ranks read why; a rank that has read
    it goes on to the next number.

    Args:
        secret: of a number.
    """
    number = max(store.add("comm/ended", 0), _Process.failed.get(key, (None, 0))[1])

    def agreed() -> None:
        store.add("comm/ended", number + 1 - store.add("comm/ended", 0))

    def failed() -> None:
        _Process.failed[key] = (store, number + 1)

    scope = f"comm/rendezvous{number}"
    seal = Seal(secret(number), scope)
    return RendezvousPoint(
        PrefixStore(scope, store), False, address, description, seal=seal, agreed=agreed, failed=failed
    )


def _agents(
    address: _Address, launch: LaunchInfo, limit: timedelta, deadline: Deadline, secret: bytes | None
) -> RendezvousPoint:
    try:
        own = wait_for_listener(address.host, address.port, deadline, address.source, server="torchrun's agent")
    except (LaunchError, CommTimeoutError) as error:
        raise type(error)(f"init_distributed: rank {launch.rank} of {launch.world_size}: {error}") from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    agents = connect(address.host, address.port, deadline, limit)
    agents.set(f"{_RESTARTS}/{launch.rank}", attempt)
    store = PrefixStore(f"/worker/attempt_{attempt}", agents)

    def of_number(number: int) -> bytes | None:
        if secret is not None or not _on_one_host(address, launch):
            return secret
        return share_secret(f"{address.host}:{address.port} {launch.job_id} {attempt} {number}", _who(launch))

    description = f"in the store of torchrun's agent at {address}"
    point = _persistent(store, (str(address), attempt), own, description, of_number)
    if secret is None and point.seal.signs:
        _check_earlier_rank(point, launch)
    return replace(
        point,
        hosted=keeps_secrets(),  # late ranks read no record once this process has removed the file
        doubt=lambda: _restarted_more_often(agents, launch, attempt),
    )


def _restarted_more_often(agents: Store, launch: LaunchInfo, attempt: str) -> str:
    """Return what to do where another rank meets the others under a later number of restarts; "" where none does.

    An agent counts only the restarts after failures of its own ranks. A lower number may be left from earlier ranks.
    """
    for rank in range(launch.world_size):
        key = f"{_RESTARTS}/{rank}"
        found = agents.get(key).decode(errors="replace") if agents.check([key]) else ""
        if found.isdecimal() and attempt.isdecimal() and int(found) > int(attempt):
            return (
                f"the agents of torchrun count restarts differently, so that these ranks do not meet: rank {rank} has "
                f"TORCHELASTIC_RESTART_COUNT={int(found)}, and rank {launch.rank} has {attempt}; run torchrun with "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which gives each attempt a store of its own"
            )
    return ""


def _check_earlier_rank(point: RendezvousPoint, launch: LaunchInfo) -> None:
    """Raise where the rank that made the secret has ended: the agent's store outlives it, the file does not."""
    if not point.store.check(["record/1"]):
        return
    try:
        point.seal.check("record/1", point.store.get("record/1"), MOST_RECORD_BYTES)
    except LaunchError as error:
        point.failed()
        raise LaunchError(
            f"init_distributed: rank {launch.rank} of {launch.world_size}: a rank of this job gave up or ended before "
            f"this one came; see what it printed, and let timeouts.init_s be longer than ranks take to start, or else "
            f"{error}"
        ) from None


def _on_one_host(address: _Address, launch: LaunchInfo) -> bool:
    """Return True where all ranks run on this host, and so can share a file."""
    if launch.local_world_size is not None:
        return launch.local_world_size == launch.world_size
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.host).is_loopback
    return address.host == "localhost"


def _host(address: _Address, launch: LaunchInfo, limit: timedelta, secret: bytes | None) -> RendezvousPoint:
    store, own = _served(address, launch, limit)
    identity = uuid.uuid4().hex
    server: dict[str, Any] = {"id": identity, "job": launch.job_id, "pid": os.getpid(), "host": host_name()}
    server["secret"] = "none" if secret is None else "environment"
    if secret is None and launch.world_size > 1 and _on_one_host(address, launch):
        secret = share_secret(identity, _who(launch))
        server["secret"] = "none" if secret is None else "file"
    seal = Seal(secret, scope_of(address.port or store.port))

    greeting, farewell = (seal.sign(GREETING, {**server, "ended": ended}) for ended in (False, True))
    store.set(GREETING, greeting)

    def given_up() -> None:
        store.compare_set(GREETING, greeting, farewell)  # not over that of a later start in the same store

    world = _world_of(server, store)
    return RendezvousPoint(
        world,
        True,
        own,
        f"at {address}",
        lambda: refusal_hint(world) or unreachable_reason(address.host, store.port),
        seal.scoped(identity),
        given_up=given_up,
    )


def _served(address: _Address, launch: LaunchInfo, limit: timedelta) -> tuple[TCPStore, str | None]:
    patience = Deadline(_CLOSING_S)
    attempts = 0
    while True:
        attempts += 1
        try:
            listener = listen(address.host, address.port, alone=launch.local_world_size == launch.world_size)
        except PortInUseError as error:
            if error.pid == os.getpid():
                with contextlib.suppress(RuntimeError):
                    return serve_again(address.host, address.port, limit), None
            elif not error.closing and error.pid is not None:  # without an owner, it may be closing
                raise
            if not patience.pause(None):
                if attempts >= _CLOSING_ATTEMPTS:
                    raise
                time.sleep(0.05)
        else:
            bound = str(listener.getsockname()[0])
            return serve(listener, limit), bound if bound not in ("0.0.0.0", "::") else None


def _world_of(server: Mapping[str, Any], store: Store) -> Store:
    return PrefixStore(f"comm/{server['id']}", store)


def _in_anothers(
    address: _Address, launch: LaunchInfo, limit: timedelta, secret: bytes | None, error: PortInUseError
) -> RendezvousPoint:
    """Join a second rank 0 of this job that has the port, so that all ranks learn of both."""
    try:
        short = Deadline(1.0)
        wait_for_listener(address.host, address.port, short, "")
        store = connect(address.host, address.port, short, limit)
        server = read_greeting(store, Deadline(0.0))
        if server is not None and server["job"] == launch.job_id:
            seal = authenticated(
                store, server, str(address), scope_of(address.port), _on_one_host(address, launch), secret
            )
            return RendezvousPoint(_world_of(server, store), False, None, f"at {address}", seal=seal)
    except (LaunchError, CommTimeoutError, RuntimeError):
        pass
    raise LaunchError(f"init_distributed: rank 0 of {launch.world_size}: {error}; {FREE_PORT}") from error


def _join(
    address: _Address, launch: LaunchInfo, limit: timedelta, deadline: Deadline, secret: bytes | None
) -> RendezvousPoint:
    who = _who(launch)
    check = RoomCheck() if secret is None and _on_one_host(address, launch) else None
    patience: Deadline | None = None
    served_before = _serves(address.port)
    while True:
        try:
            own = wait_for_listener(address.host, address.port, deadline, address.source, check)
            store = connect(address.host, address.port, deadline, limit, explain=False)
            server = read_greeting(store, deadline, str(address))
        except (ConnectionEndedError, RuntimeError) as error:
            if isinstance(error, LaunchError):
                raise LaunchError(f"{who}: {error}") from None
            if isinstance(error, CommTimeoutError) and not isinstance(error, ConnectionEndedError):
                raise CommTimeoutError(f"{who}: {error}") from None
            if isinstance(error, NoStoreError) and not _Process.servers:
                raise CommTimeoutError(f"{who}: {error}") from None
            # A store of the last world or job, perhaps, which is just closing, or a proxy before rank 0 is up.
            seen = str(error) if isinstance(error, ConnectionEndedError) else "ends the connection"
            if deadline.pause(partial(_hung_up, address, seen)):
                continue
            told = seen if isinstance(error, NoStoreError) else explained(address.host, address.port, seen)
            raise CommTimeoutError(f"{who}: after {deadline.elapsed_s():.3g} s, {told}") from None
        if server is None:
            raise CommTimeoutError(
                f"{who}: a store answers at {address}, but rank 0 has written nothing there in time, so it may be "
                f"another program's; {FREE_PORT}"
            )
        if server["job"] != launch.job_id:
            raise LaunchError(
                f"{who}: the store at {address} belongs to another job ({server['job']}, pid {server['pid']} on "
                f"{server['host']}; this is {launch.job_id}); {FREE_PORT}"
            )
        if served_before and (server["pid"], server["host"]) == (os.getpid(), host_name()):
            if _is_replaced(store, server) and deadline.pause(None):
                continue
            raise LaunchError(
                f"{who}: this process itself (pid {os.getpid()}) still listens at {address}, where the new rank 0 "
                "cannot: it was rank 0 of an earlier world, and keeps its store by a reference to a group of it; "
                f"delete the variables that hold such groups when you destroy them, or {FREE_PORT}"
            )
        known = server["id"] in _Process.servers
        if server.get("ended", False) and not known:
            # Rank 0 gave up waiting for ranks such as this one. It may begin anew; else they hear why it did.
            patience = patience or Deadline(min(_CLOSING_S, deadline.left_s()))
            if patience.pause(None):
                del store
                continue
        if not known:
            try:
                seal = authenticated(
                    store, server, str(address), scope_of(address.port), _on_one_host(address, launch), secret
                )
            except LaunchError as error:
                if _is_replaced(store, server) and deadline.pause(None):
                    continue  # it was rank 0's last store
                if secret is not None or server["secret"] == "environment":
                    leave_refusal_hint(_world_of(server, store))
                raise LaunchError(f"{who}: {error}") from None
            _Process.servers.add(server["id"])
            return RendezvousPoint(_world_of(server, store), False, own, f"at {address}", seal=seal)
        # Rank 0 has not begun its next world yet.
        del store
        if not deadline.pause(lambda: f"for rank 0, which is still in the last world at {address}"):
            raise CommTimeoutError(f"{who}: rank 0 is still in the last world, at {address}")


def _serves(port: int) -> bool:
    """Return True where a store of this process listens at ``port``, and not until the next collection of garbage."""
    if serves(port):
        gc.collect()
    return serves(port)


def _who(launch: LaunchInfo) -> str:
    return f"init_distributed: rank {launch.rank} of {launch.world_size}"


def _hung_up(address: _Address, seen: str) -> str:
    return f"for rank 0 at {address}, where a server accepted a connection and {seen}"


def _is_replaced(store: Store, server: Mapping[str, Any]) -> bool:
    """Return True where ``store`` is gone, or serves another world than ``server``, which was read from it."""
    try:
        now = read_greeting(store, Deadline(0.0))
    except (RuntimeError, LaunchError):
        return True
    return now is None or now["id"] != server["id"]
