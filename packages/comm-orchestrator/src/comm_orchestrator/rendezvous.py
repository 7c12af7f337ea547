"""The key-value store where the ranks meet."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, rendezvous

from comm_utils.errors import ArgumentTypeError, CommTimeoutError, LaunchError
from comm_utils.launch import LaunchInfo

__all__ = ["meet"]


class _Generation:
    """How often this process has met the others; keys of an earlier time are never met again."""

    number = 0


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
    if not (store is None or isinstance(store, Store)):
        raise ArgumentTypeError(f"init_distributed: store: got {store!r:.60}; expected a torch.distributed.Store")
    end = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            met = _meet(store or _connect(launch, init_method, default_port, timeout), launch, timeout)
            break
        except _ClosedError as error:
            # A rank that is quick to come back may reach the server of the last generation, which rank 0 is closing.
            if not _Generation.number or time.monotonic() > end:
                raise LaunchError(str(error)) from error.__cause__
            time.sleep(0.02)
    _Generation.number += 1
    return met


class _ClosedError(Exception):
    """Whoever hosts the store has closed it."""


_CLOSED = re.compile(r"connection (was )?(likely )?(closed|reset)|broken pipe", re.IGNORECASE)


def _meet(store: Store, launch: LaunchInfo, timeout: timedelta) -> Store:
    """A part of ``store`` for this generation, once every rank is here: what follows would wait longer for them."""
    store.set_timeout(timeout)
    met = PrefixStore(f"comm/gen{_Generation.number + 1}", store)
    if launch.world_size == 1:
        return met
    mine = f"here/{launch.rank}"
    who = f"rank {launch.rank} of {launch.world_size}"
    try:
        met.set(mine, "here")
        if met.add("here", 1) == launch.world_size:
            met.set("complete", "here")
        met.wait(["complete"], timeout)
    except RuntimeError as error:
        if _CLOSED.search(str(error)):
            raise _ClosedError(f"{who}: the store was closed while the ranks met: {error}") from error
        missing = [rank for rank in range(launch.world_size) if not met.check([f"here/{rank}"])]
        # As if this rank had not been here, so that it may come again.
        met.add("here", -1)
        met.delete_key(mine)
        raise CommTimeoutError(
            f"{who}: ranks {missing} did not come within {timeout.total_seconds():g} s; check that all "
            f"{launch.world_size} ranks were started"
        ) from error
    return met


def _connect(launch: LaunchInfo, init_method: str | None, default_port: int, timeout: timedelta) -> Store:
    url = init_method or _address(launch, default_port)
    return HashStore() if url is None else _rendezvous(url, launch, timeout)


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
        if _CLOSED.search(text):
            raise _ClosedError(f"{where}: {text}") from error
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
