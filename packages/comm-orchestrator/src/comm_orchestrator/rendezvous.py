"""The key-value store where the ranks meet."""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, rendezvous

from comm_utils.errors import ArgumentTypeError, CommTimeoutError, LaunchError
from comm_utils.launch import LaunchInfo

__all__ = ["disconnect", "meet"]


class _Generation:
    """How often this process has met the others; keys of an earlier time are never met again."""

    number = 0


class _Last:
    """The connection made last. It outlives ``destroy_process_group()``: if every generation had one of its own, a rank
    that is quick to initialise again would reach the server that rank 0 is about to close.
    """

    key: tuple[str | int | None, ...] = ()
    store: Store | None = None


def disconnect() -> None:
    """Let go of the connection made last; torch's own initialisation would find its old keys behind the same port."""
    _Last.key, _Last.store = (), None


def meet(
    launch: LaunchInfo, init_method: str | None, default_port: int, timeout: timedelta, store: Store | None = None
) -> Store:
    """A store that all ranks of ``launch`` share, private to this generation.

    Args:
        init_method: a ``tcp://``, ``file://`` or ``env://`` address that overrides the launcher's.
        default_port: where nobody names one.
        store: one that the caller made; used instead.

    Raises:
        LaunchError: no address, or one that cannot be used.
        CommTimeoutError: the other ranks did not come in time.
    """
    if store is None:
        store = _connect(launch, init_method, default_port, timeout)
    elif not isinstance(store, Store):
        raise ArgumentTypeError(f"init_distributed: store: got {store!r:.60}; expected a torch.distributed.Store")
    store.set_timeout(timeout)
    met = PrefixStore(f"comm/gen{_Generation.number + 1}", store)
    _wait_for_all(met, launch, timeout)
    _Generation.number += 1
    return met


def _wait_for_all(store: Store, launch: LaunchInfo, timeout: timedelta) -> None:
    """Return when every rank is here: what follows waits for the others as long as the libraries like."""
    if launch.world_size == 1:
        return
    mine = f"here/{launch.rank}"
    store.set(mine, "here")
    if store.add("here", 1) == launch.world_size:
        store.set("complete", "here")
    try:
        store.wait(["complete"], timeout)
    except RuntimeError as error:
        missing = [rank for rank in range(launch.world_size) if not store.check([f"here/{rank}"])]
        # As if this rank had not been here, so that it may come again.
        store.add("here", -1)
        store.delete_key(mine)
        raise CommTimeoutError(
            f"rank {launch.rank} of {launch.world_size}: ranks {missing} did not come within "
            f"{timeout.total_seconds():g} s; check that all {launch.world_size} ranks were started"
        ) from error


def _connect(launch: LaunchInfo, init_method: str | None, default_port: int, timeout: timedelta) -> Store:
    url = init_method or _address(launch, default_port)
    if url is None:
        return HashStore()
    environ = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    key = (url, launch.rank, launch.world_size, *environ)
    if _Last.store is None or _Last.key != key or not _answers(_Last.store):
        _Last.store = None  # closed before the next one is opened, which may need its port
        _Last.key, _Last.store = key, _rendezvous(url, launch, timeout)
    return _Last.store


def _answers(store: Store) -> bool:
    try:
        store.check(["comm"])
    except RuntimeError:
        return False
    return True


def _rendezvous(url: str, launch: LaunchInfo, timeout: timedelta) -> Store:
    try:
        store: Store = next(rendezvous(url, launch.rank, launch.world_size, timeout=timeout))[0]
    except (RuntimeError, ValueError) as error:
        text = str(error)
        where = f"rank {launch.rank} of {launch.world_size} could not meet the others at {_shown(url, launch)}"
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            raise LaunchError(
                f"{where}: the port is in use; set MASTER_PORT or distributed_port to a free one "
                f"({text.splitlines()[0]})"
            ) from error
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise CommTimeoutError(
                f"{where} within {timeout.total_seconds():g} s; check that rank 0 runs there and that "
                f"all {launch.world_size} ranks were started ({text.splitlines()[0]})"
            ) from error
        raise LaunchError(f"{where}: {text}") from error
    return store


def _address(launch: LaunchInfo, default_port: int) -> str | None:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "env://"  # torchrun's agent hosts the store, whichever rank this is
    if launch.master_addr is not None and launch.world_size > 1 and (launch.master_port or default_port) == 0:
        raise LaunchError(
            f"port: got 0, which every one of {launch.world_size} ranks would choose for itself; set MASTER_PORT or "
            "distributed_port to one number for all"
        )
    if launch.master_addr is not None:
        return f"tcp://{launch.master_addr}:{launch.master_port or default_port}"
    if launch.world_size == 1:
        return None
    raise LaunchError(
        f"{launch.world_size} ranks were announced ({launch.sources.get('world_size', launch.launcher)}) but not "
        "where they meet; set MASTER_ADDR to the host of rank 0 (and MASTER_PORT), or pass init_method='tcp://host:port'"
    )


def _shown(url: str, launch: LaunchInfo) -> str:
    if url.startswith("env://"):
        return f"{launch.master_addr}:{launch.master_port} (MASTER_ADDR, MASTER_PORT)"
    return url
