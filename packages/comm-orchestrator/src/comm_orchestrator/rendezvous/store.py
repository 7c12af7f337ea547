"""The key-value store where the ranks meet."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import SplitResult, urlsplit

from torch.distributed import HashStore, PrefixStore, Store, TCPStore, rendezvous

import comm_config
from comm_orchestrator.rendezvous.client import ConnectionEndedError, connect, leads_here, reach
from comm_orchestrator.rendezvous.protocol import Deadline, Place
from comm_orchestrator.rendezvous.server import PortInUseError, listen, serve, serve_again
from comm_utils.errors import ArgumentTypeError, CommTimeoutError, LaunchError
from comm_utils.launch import LaunchInfo

__all__ = ["open_store"]

_REMEDY = "set MASTER_PORT (or distributed_port) to a free port, the same on every rank"
# How long the last store of this process, or of the one before it, may take to leave its port.
_CLOSING_S = 3.0


@dataclass(frozen=True)
class _Address:
    host: str
    port: int
    source: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port} ({self.source})"


class _Process:
    """What this process remembers of the stores it met in: the server of the last one, and meetings that failed.

    The key of a meeting is what its store is known by; the store itself is kept so that its id stays its own.
    """

    server: str | None = None
    failed: ClassVar[dict[object, tuple[object, int]]] = {}


def open_store(
    launch: LaunchInfo,
    settings: comm_config.Settings,
    limit: timedelta,
    deadline: Deadline,
    store: Store | None,
) -> Place:
    """A store that all ranks of ``launch`` share and nobody has used before.

    Args:
        settings: ``process_group.init_method`` overrides the launcher's address.
        limit: of the store's own operations.
        deadline: until when rank 0 is looked for.
        store: one that the caller made; used instead.

    Raises:
        LaunchError: no address, or one that cannot be used.
        CommTimeoutError: nobody answers there.
    """
    if not (store is None or isinstance(store, Store)):
        raise ArgumentTypeError(f"init_distributed: store: got {store!r:.60}; expected a torch.distributed.Store")
    if store is not None:
        return _persistent(store, id(store), None, "in a store (argument store)")
    init_method = settings.process_group.init_method
    url, url_port = _parsed(init_method or "env://")
    source = settings.sources.get("process_group.init_method", "")
    if url.scheme not in ("env", "tcp"):
        own = _torchs_own(str(init_method), launch, limit)
        return _persistent(own, init_method, None, f"at {init_method} ({source})")
    if url.scheme == "tcp":
        if url.hostname is None or url.query or url_port is None:
            raise LaunchError(
                f"init_distributed: init_method: got {init_method!r}; expected tcp://host:port, with rank and "
                "world_size as arguments beside it"
            )
        address = _Address(url.hostname, url_port, f"init_method, {source}")
    elif launch.master_addr is None and launch.world_size == 1:
        return Place(HashStore(), hosted=True)
    else:
        address = _masters(launch, settings.launch.master_port)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return _agents(address, limit, deadline)
    if launch.world_size > 1 and address.port == 0:
        raise LaunchError(
            f"init_distributed: port: got 0, which each of {launch.world_size} ranks would choose for itself; {_REMEDY}"
        )
    if launch.rank == 0:
        try:
            return _host(address, launch, limit)
        except PortInUseError as error:
            return _in_anothers(address, launch, limit, error)
    return _join(address, launch, limit, deadline)


def _parsed(init_method: str) -> tuple[SplitResult, int | None]:
    try:
        url = urlsplit(init_method)
        return url, url.port
    except ValueError as error:
        raise LaunchError(
            f"init_distributed: init_method: got {init_method!r} ({error}); expected tcp://host:port, file:///path or "
            "env://"
        ) from error


def _masters(launch: LaunchInfo, default_port: int) -> _Address:
    if launch.master_addr is None:
        raise LaunchError(
            f"init_distributed: {launch.world_size} ranks were announced "
            f"({launch.sources.get('world_size', launch.launcher)}) but not where they meet; set MASTER_ADDR to the "
            "host of rank 0 (and MASTER_PORT), or pass init_method='tcp://host:port'"
        )
    port = default_port if launch.master_port is None else launch.master_port
    return _Address(launch.master_addr, port, launch.sources.get("master_addr", launch.launcher))


def _torchs_own(url: str, launch: LaunchInfo, limit: timedelta) -> Store:
    try:
        store: Store = next(rendezvous(url, launch.rank, launch.world_size, timeout=limit))[0]
    except (RuntimeError, ValueError, OSError) as error:
        raise LaunchError(
            f"init_distributed: rank {launch.rank} of {launch.world_size} cannot meet the others at {url}: {error}"
        ) from error
    return store


def _persistent(store: Store, key: object, address: str | None, description: str) -> Place:
    """A store that may outlive a world: every meeting in it has a number.

    Those that ended well are counted in the store. One that failed stays open, for ranks that are late to hear why; who
    has heard it, goes on to the next.
    """
    number = max(store.add("comm/ended", 0), _Process.failed.get(key, (None, 0))[1])

    def agreed() -> None:
        store.add("comm/ended", number + 1 - store.add("comm/ended", 0))

    def failed() -> None:
        _Process.failed[key] = (store, number + 1)

    met = PrefixStore(f"comm/meeting{number}", store)
    return Place(met, False, address, description, agreed=agreed, failed=failed)


def _agents(address: _Address, limit: timedelta, deadline: Deadline) -> Place:
    own = reach(address.host, address.port, deadline, address.source)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"/worker/attempt_{attempt}", connect(address.host, address.port, deadline, limit))
    return _persistent(store, (str(address), attempt), own, f"in the store of torchrun's agent at {address}")


def _host(address: _Address, launch: LaunchInfo, limit: timedelta) -> Place:
    store, own = _served(address, launch, limit)
    server = {"id": uuid.uuid4().hex, "job": launch.job_id, "pid": os.getpid(), "host": socket.gethostname()}
    store.set("comm/server", json.dumps(server))
    return Place(_world_of(server, store), True, own, f"at {address}", lambda: leads_here(address.host, store.port))


def _served(address: _Address, launch: LaunchInfo, limit: timedelta) -> tuple[TCPStore, str | None]:
    patience = Deadline(_CLOSING_S)
    while True:
        try:
            listener = listen(address.host, address.port, alone=launch.local_world_size == launch.world_size)
        except PortInUseError as error:
            if error.pid == os.getpid():
                with contextlib.suppress(RuntimeError):
                    return serve_again(address.host, address.port, limit), None
            elif not error.closing:
                raise
            if not patience.pause(None):
                raise
        else:
            bound = str(listener.getsockname()[0])
            return serve(listener, limit), bound if bound not in ("0.0.0.0", "::") else None


def _world_of(server: Mapping[str, Any], store: Store) -> Store:
    return PrefixStore(f"comm/{server['id']}", store)


def _in_anothers(address: _Address, launch: LaunchInfo, limit: timedelta, error: PortInUseError) -> Place:
    """Where rank 0 finds the port taken: by a second rank 0 of this job, perhaps, which the meeting will find out."""
    try:
        short = Deadline(1.0)
        reach(address.host, address.port, short, "")
        store = connect(address.host, address.port, short, limit)
        server = json.loads(store.get("comm/server")) if store.check(["comm/server"]) else None
        if server is not None and server["job"] == launch.job_id:
            return Place(_world_of(server, store), False, None, f"at {address}")
    except (LaunchError, CommTimeoutError, RuntimeError):
        pass
    raise LaunchError(f"init_distributed: rank 0 of {launch.world_size}: {error}; {_REMEDY}") from error


def _join(address: _Address, launch: LaunchInfo, limit: timedelta, deadline: Deadline) -> Place:
    who = f"init_distributed: rank {launch.rank} of {launch.world_size}"
    while True:
        try:
            own = reach(address.host, address.port, deadline, address.source)
            store = connect(address.host, address.port, deadline, limit)
            server = _server(store, deadline)
        except (ConnectionEndedError, RuntimeError) as error:
            if isinstance(error, LaunchError):
                raise LaunchError(f"{who}: {error}") from None
            if isinstance(error, CommTimeoutError) and not isinstance(error, ConnectionEndedError):
                raise CommTimeoutError(f"{who}: {error}") from None
            # The store of the last world, perhaps, which rank 0 is just closing.
            if _Process.server is None or not deadline.pause(None):
                raise CommTimeoutError(f"{who}: {error}") from error
            continue
        if server is None:
            raise CommTimeoutError(f"{who}: a store answers at {address}, but rank 0 has not made it; {_REMEDY}")
        if server["job"] != launch.job_id:
            raise LaunchError(
                f"{who}: the store at {address} belongs to another job ({server['job']}, pid {server['pid']} on "
                f"{server['host']}; this is {launch.job_id}); {_REMEDY}"
            )
        if server["id"] != _Process.server:
            _Process.server = server["id"]
            return Place(_world_of(server, store), False, own, f"at {address}")
        # Rank 0 has not begun its next world yet.
        del store
        if not deadline.pause(lambda: f"for rank 0, which is still in the last world at {address}"):
            raise CommTimeoutError(f"{who}: rank 0 is still in the last world, at {address}")


def _server(store: Store, deadline: Deadline) -> dict[str, Any] | None:
    limit = Deadline(min(5.0, max(0.0, deadline.left_s())))
    while not store.check(["comm/server"]):
        if not limit.pause(str):
            return None
    found: dict[str, Any] = json.loads(store.get("comm/server"))
    return found
