"""Meeting the other ranks and agreeing with them on what has to be the same everywhere."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

import comm_config
from comm_orchestrator import devices, interfaces, rank_discovery, selector
from comm_orchestrator.rendezvous.dns import with_limit
from comm_orchestrator.rendezvous.protocol import Deadline, Place, meet
from comm_orchestrator.rendezvous.records import (
    AGREED_SETTINGS,
    AGREED_VARIABLES,
    Arrival,
    Finding,
    check_devices,
    device_indices,
)
from comm_orchestrator.rendezvous.store import open_store
from comm_utils.errors import BackendUnavailableError, CommError, CommTimeoutError, PeerLostError
from comm_utils.launch import LaunchInfo

__all__ = ["Joined", "join", "last_words"]

# How long a rank that cannot go on tries to tell the others why, before it raises.
_LAST_WORDS = timedelta(seconds=5)
_OVERTIME_S = 1.7


@dataclass(frozen=True)
class Joined:
    """What all ranks agreed on, and this rank's part in it.

    Attributes:
        launch: with what the launcher did not say about hosts.
        peer: an address of another host; None where all ranks are on this one.
        device_type, device_index: what this rank is to compute on.
    """

    launch: LaunchInfo
    choice: selector.Choice
    place: Place
    peer: str | None
    device_type: str
    device_index: int

    def bind(self) -> torch.device | None:
        """Make the device the current one, where the backend serves it and the program has not touched any yet."""
        kind = self.device_type if self.device_type in _device_kinds(self.choice.backend) else "cpu"
        return devices.bind_device(kind, self.device_index)


def join(launch: LaunchInfo, settings: comm_config.Settings, limit: timedelta, store: Store | None) -> Joined:
    """Meet the other ranks within ``limit``.

    Raises:
        CommError: what is wrong, with the same message on every rank where a comparison of the ranks shows it.
    """
    kind = devices.device_type()
    mine = _arrival(launch, settings, kind)
    named = settings.process_group.backend
    try:
        choice = selector.choose(named) if named is not None else None
        interfaces.variables(os.environ, None, interfaces.addresses(), ccl=False)
    except CommError as error:
        last_words(launch, settings, limit, store, error)
        raise

    def judge(arrivals: Sequence[Arrival]) -> Any:
        return _judge(arrivals, choice)

    place, agreed = _met(launch, settings, limit, store, mine, judge)
    choice = selector.Choice(**agreed["choice"])
    if launch.rank == 0 and named is None:
        selector.warn_of_fall_back(choice, kind)
    launch = rank_discovery.with_hosts(launch, agreed["host_of"])
    addresses = agreed["addresses"]
    others = [address for host, address in enumerate(addresses) if host != launch.node_rank and address is not None]
    peer = others[0] if others else (launch.master_addr or "") if len(addresses) > 1 else None
    return Joined(launch, choice, place, peer, kind, agreed["devices"][launch.rank])


def _met(
    launch: LaunchInfo,
    settings: comm_config.Settings,
    limit: timedelta,
    store: Store | None,
    mine: Arrival,
    judge: Callable[[Sequence[Arrival]], Any],
) -> tuple[Place, Any]:
    """Meet, within the limit and not a second more: a store whose host is frozen answers no call, and ends none."""
    who = f"init_distributed: rank {launch.rank} of {launch.world_size}"
    deadline = Deadline(limit.total_seconds())
    places: list[Place] = []

    def run() -> Any:
        places.append(open_store(launch, settings, limit, deadline, store))
        return meet(replace(mine, address=places[0].address), deadline, judge, places[0])

    if launch.world_size == 1:
        alone = run()  # nobody can keep it waiting
        return places[0], alone
    outcome = with_limit(lambda: (run(),), limit.total_seconds() + _OVERTIME_S)
    if isinstance(outcome, tuple):
        return places[0], outcome[0]
    place = places[0].description if places else "that they meet in"
    if outcome is None:
        raise CommTimeoutError(f"{who}: the store {place} stopped answering; see whether the host of rank 0 still runs")
    try:
        if isinstance(outcome, CommError) or not isinstance(outcome, RuntimeError):
            raise outcome
        raise PeerLostError(
            f"{who}: the store {place} was lost while the ranks met ({str(outcome).splitlines()[0]}); see what rank 0, "
            "or whoever else serves it, printed before it ended"
        ) from outcome
    finally:
        places.clear()
        del outcome  # an error that its own traceback keeps alive would keep the store alive


def last_words(
    launch: LaunchInfo, settings: comm_config.Settings, limit: timedelta, store: Store | None, error: CommError
) -> None:
    """Tell the ranks that come within a moment why this one cannot take part."""
    if launch.world_size == 1:
        return
    mine = replace(_arrival(launch, settings, devices.device_type()), problem=(type(error).__name__, str(error)))
    with contextlib.suppress(Exception):  # what is raised then is what it was all about
        _met(launch, settings, min(limit, _LAST_WORDS), store, mine, lambda _: None)


def _arrival(launch: LaunchInfo, settings: comm_config.Settings, kind: str) -> Arrival:
    count, visible = devices.visible_devices(kind)
    return Arrival(
        launch.rank,
        launch.world_size,
        socket.gethostname(),
        _host_id(),
        os.getpid(),
        program=Path(sys.argv[0]).name,
        local_rank=launch.local_rank,
        sources={name: launch.sources.get(name, launch.launcher) for name in ("rank", "world_size")},
        versions={
            "torch": torch.__version__.partition("+")[0],
            "comm-orchestrator": version("comm-orchestrator"),
        },
        settings={
            **{key: settings.value(key) for key in AGREED_SETTINGS},
            **{name: os.environ.get(name) for name in AGREED_VARIABLES},
        },
        device_type=kind,
        device_count=count,
        visible_devices=visible,
        obstacles=selector.obstacles(kind) if settings.process_group.backend is None else {},
        within_host=selector.within_host(kind) if settings.process_group.backend is None else {},
    )


def _host_id() -> str:
    """The same in two processes only if they share a kernel and a network."""
    try:
        boot, network = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")
    except OSError:
        boot, network = platform.node(), ""
    return f"{socket.gethostname()}/{boot}/{network}"


def _judge(arrivals: Sequence[Arrival], choice: selector.Choice | None) -> dict[str, Any] | Finding:
    """What all ranks go by, from the records of all of them."""
    if choice is None:
        try:
            hosts = len({one.host_id for one in arrivals})
            answers = [{**one.obstacles, **(one.within_host if hosts > 1 else {})} for one in arrivals]
            choice = selector.agree(arrivals[0].device_type, answers)
        except BackendUnavailableError as error:
            return Finding(type(error).__name__, str(error))
    finding = check_devices(arrivals, _device_kinds(choice.backend))
    if finding is not None:
        return finding
    order = {host_id: number for number, host_id in enumerate(dict.fromkeys(one.host_id for one in arrivals))}
    addresses: list[str | None] = [None] * len(order)
    for one in arrivals:
        addresses[order[one.host_id]] = addresses[order[one.host_id]] or one.address
    indices = device_indices(arrivals)
    return {
        "choice": asdict(choice),
        "host_of": [order[one.host_id] for one in arrivals],
        "addresses": addresses,
        "devices": [indices[one.rank] for one in arrivals],
    }


def _device_kinds(backend: str) -> set[str]:
    if ":" in backend:
        return {part.partition(":")[0] for part in backend.split(",")}
    return {"nccl": {"cuda"}, "xccl": {"xpu"}}.get(backend, {"cpu"})
