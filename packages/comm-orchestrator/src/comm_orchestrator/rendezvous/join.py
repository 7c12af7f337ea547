"""Join the other ranks, and agree with them on what has to be the same everywhere."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

import comm_config
from comm_orchestrator import devices, interfaces, rank_discovery, selector
from comm_orchestrator.rendezvous.code_digests import code_digests
from comm_orchestrator.rendezvous.dns import ask_briefly
from comm_orchestrator.rendezvous.protocol import Deadline, RendezvousPoint, rendezvous
from comm_orchestrator.rendezvous.records import (
    AGREED_SETTINGS,
    AGREED_VARIABLES,
    RankRecord,
    Refusal,
    check_devices,
    device_indices,
)
from comm_orchestrator.rendezvous.store import open_store
from comm_utils.errors import BackendUnavailableError, CommError, CommTimeoutError, LaunchError, PeerLostError
from comm_utils.host_identity import host_identity, host_name
from comm_utils.launch import LaunchInfo
from comm_utils.process_state import start_time
from comm_utils.rank_processes import RankProcess, own_pid_space
from comm_utils.threads import with_limit

__all__ = ["RendezvousResult", "join", "report_to_peers"]

# How long a rank that cannot start tries to report why to the others, before it raises.
_REPORT_LIMIT = timedelta(seconds=5)
_OVERTIME_S = 1.7
# How long a rank that was interrupted waits until those that have come know; a second one interrupts that.
_WINDING_UP_S = 3.0
_MOST_SHOWN = 200


@dataclass(frozen=True)
class RendezvousResult:
    """The values that all ranks agreed on, and this rank's own.

    Attributes:
        launch: with what the launcher did not say about hosts.
        host_of: the host of each rank, as a number.
        peer: an address of another host; None where all ranks are on this one.
        processes: of all ranks.
        device_type, device_index: what this rank is to compute on.
    """

    launch: LaunchInfo
    host_of: Sequence[int]
    choice: selector.Choice
    point: RendezvousPoint
    peer: str | None
    device_type: str
    device_index: int
    processes: Sequence[RankProcess]

    def bind(self) -> torch.device | None:
        """Make the device the current one, where the backend serves it and the program has not touched any yet."""
        kind = self.device_type if self.device_type in _device_kinds(self.choice.backend) else "cpu"
        return devices.bind_device(kind, self.device_index)


def join(launch: LaunchInfo, settings: comm_config.Settings, limit: timedelta, store: Store | None) -> RendezvousResult:
    """Join the other ranks within ``limit``.

    Raises:
        CommError: what is wrong, with the same message on every rank where a comparison of the ranks shows it.
    """
    kind = devices.device_type()
    mine = _own_record(launch, settings, kind)
    named = settings.process_group.backend
    try:
        choice = _named_choice(named, kind, settings.sources["process_group.backend"]) if named is not None else None
        interfaces.variables(os.environ, None, interfaces.addresses(), ccl=False)
        if launch.world_size > 1:
            mine = replace(mine, versions={**mine.versions, **code_digests()})
    except CommError as error:
        report_to_peers(launch, settings, limit, store, error)
        raise

    def judge(records: Sequence[RankRecord]) -> Any:
        return _judge(records, choice)

    point, agreed = _meet_within(launch, settings, limit, store, mine, judge)
    _check_agreement(agreed, launch.world_size)
    choice = selector.Choice(**agreed["choice"])
    if launch.rank == 0 and named is None:
        selector.warn_of_fall_back(choice, kind)
    launch = rank_discovery.with_hosts(launch, agreed["host_of"])
    peer = _peer(launch, agreed["host_of"], agreed["addresses"])
    device, processes = agreed["devices"][launch.rank], _processes(agreed)
    return RendezvousResult(launch, agreed["host_of"], choice, point, peer, kind, device, processes)


def _named_choice(named: str, kind: str, source: str) -> selector.Choice:
    try:
        return selector.choose(named, kind)
    except BackendUnavailableError as error:
        where = "init_distributed: dist_backend" if source == "argument" else f"{source}: process_group.backend"
        raise BackendUnavailableError(f"{where}: {error}") from None


def _peer(launch: LaunchInfo, host_of: Sequence[int], addresses: Sequence[str | None]) -> str | None:
    """Return an address of another host, empty where none is known; None where all ranks are on this one."""
    if len(addresses) == 1:
        return None
    own = host_of[launch.rank]
    others = [address for host, address in enumerate(addresses) if host != own and address is not None]
    return others[0] if others else launch.master_addr or ""


def _meet_within(
    launch: LaunchInfo,
    settings: comm_config.Settings,
    limit: timedelta,
    store: Store | None,
    mine: RankRecord,
    judge: Callable[[Sequence[RankRecord]], Any],
    needs_thread: bool = True,
) -> tuple[RendezvousPoint, Any]:
    """Run the rendezvous in a thread that can be left behind: a store whose host is frozen never answers a call.

    Args:
        needs_thread: False does without where there can be none.
    """
    who = f"init_distributed: rank {launch.rank} of {launch.world_size}"
    deadline = Deadline(limit.total_seconds())
    points: list[RendezvousPoint] = []
    begun, ended = threading.Event(), threading.Event()

    def run() -> Any:
        begun.set()
        try:
            if launch.world_size > 1:
                ask_briefly()  # in the thread, and not in the caller's
            points.append(open_store(launch, settings, limit, deadline, store))
            return rendezvous(replace(mine, address=points[0].address), deadline, judge, points[0])
        except BaseException as error:
            if not deadline.interruption:
                raise
            _release_frames(error)  # nobody reads it, and it would keep the store listening
        finally:
            if deadline.interruption:
                points.clear()
            ended.set()

    if launch.world_size == 1:
        alone = run()  # nobody can keep it waiting
        return points[0], alone
    try:
        outcome = with_limit(lambda: (run(),), limit.total_seconds() + _OVERTIME_S, needs_thread=needs_thread)
    except BaseException as error:  # of a signal handler, such as Ctrl-C; or there is no thread
        deadline.interrupt(f"{type(error).__name__}: {error}"[:_MOST_SHOWN])
        if begun.is_set() and ended.wait(_WINDING_UP_S):
            points.clear()
        raise
    if isinstance(outcome, tuple):
        return points[0], outcome[0]
    place = points[0].description if points else "that they meet in"
    if outcome is None:
        raise CommTimeoutError(f"{who}: the store {place} stopped answering; see whether the host of rank 0 still runs")
    try:
        if isinstance(outcome, CommError) or not isinstance(outcome, RuntimeError):
            raise outcome
        raise PeerLostError(
            f"{who}: the store {place} was lost while the ranks met ({str(outcome).splitlines()[0]}); see what rank 0, "
            "or another process that serves it, printed before it ended"
        ) from outcome
    finally:
        points.clear()
        _release_frames(outcome)
        del outcome  # an error that its own traceback keeps alive would keep the store alive


def _release_frames(error: BaseException | None) -> None:
    """Drop what the frames of a failed rendezvous hold: who keeps the error would keep the store listening."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def report_to_peers(
    launch: LaunchInfo, settings: comm_config.Settings, limit: timedelta, store: Store | None, error: CommError
) -> None:
    """Report to the ranks that start within a moment why this one cannot take part."""
    if launch.world_size == 1:
        return
    mine = replace(_own_record(launch, settings, devices.device_type()), problem=(type(error).__name__, str(error)))
    with contextlib.suppress(Exception):  # the error that is reported matters more
        # Also of a rank that reports that it can start no thread.
        _meet_within(launch, settings, min(limit, _REPORT_LIMIT), store, mine, lambda _: None, needs_thread=False)


def _own_record(launch: LaunchInfo, settings: comm_config.Settings, kind: str) -> RankRecord:
    count, visible = devices.visible_devices(kind)
    return RankRecord(
        launch.rank,
        launch.world_size,
        host_name(),
        _host_id(),
        os.getpid(),
        program=Path(next(iter(sys.argv), "")).name,
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
        unavailable_reasons=selector.unavailable_reasons(kind) if settings.process_group.backend is None else {},
        pid_space=own_pid_space(),
        started=start_time(),
        within_host=selector.within_host(kind) if settings.process_group.backend is None else {},
    )


def _host_id() -> str:
    """Return an id that two processes share only if they share a kernel and a network."""
    try:
        return f"{host_name()}/{host_identity('net')}"
    except OSError:
        return host_name()


def _judge(records: Sequence[RankRecord], choice: selector.Choice | None) -> dict[str, Any] | Refusal:
    """Settle the start of all ranks from the records of all of them."""
    if choice is None:
        try:
            hosts = len({one.host_id for one in records})
            answers = [{**one.unavailable_reasons, **(one.within_host if hosts > 1 else {})} for one in records]
            choice = selector.agree(records[0].device_type, answers)
        except BackendUnavailableError as error:
            return Refusal(type(error).__name__, str(error))
    refusal = check_devices(records, _device_kinds(choice.backend))
    if refusal is not None:
        return refusal
    order = {host_id: number for number, host_id in enumerate(dict.fromkeys(one.host_id for one in records))}
    addresses: list[str | None] = [None] * len(order)
    for one in records:
        if interfaces.is_for_other_hosts(one.address):  # ranks of rank 0's host may have come over loopback
            addresses[order[one.host_id]] = addresses[order[one.host_id]] or one.address
    indices = device_indices(records)
    names = {one.host_id: one.host for one in records}
    spaces = {space: number for number, space in enumerate(dict.fromkeys(one.pid_space for one in records))}
    return {
        "choice": asdict(choice),
        "host_of": [order[one.host_id] for one in records],
        "addresses": addresses,
        "devices": [indices[one.rank] for one in records],
        "hosts": [names[host_id] for host_id in order],
        "pids": [one.pid for one in records],
        "started": [one.started for one in records],
        "pid_spaces": list(spaces),
        "pid_space_of": [spaces[one.pid_space] for one in records],
    }


def _processes(agreed: dict[str, Any]) -> list[RankProcess]:
    """Return the process of each rank, of what the ranks agreed on."""
    each = zip(agreed["host_of"], agreed["pids"], agreed["pid_space_of"], agreed["started"], strict=True)
    hosts, spaces = agreed["hosts"], agreed["pid_spaces"]
    return [RankProcess(hosts[host], pid, spaces[space], started) for host, pid, space, started in each]


def _check_agreement(agreed: Any, world_size: int) -> None:
    """Check what came from the store before it is used.

    Raises:
        LaunchError: it is not what :func:`_judge` returns for ``world_size`` ranks.
    """

    def numbers(value: object) -> bool:
        return isinstance(value, list) and len(value) == world_size and all(type(one) is int for one in value)

    def texts(value: object) -> bool:
        return isinstance(value, list) and all(isinstance(one, str) for one in value)

    well_formed = (
        isinstance(agreed, dict)
        and isinstance(agreed.get("choice"), dict)
        and set(agreed["choice"]) == {one.name for one in fields(selector.Choice)}
        and all(isinstance(one, str) for one in agreed["choice"].values())
        and all(numbers(agreed.get(name)) for name in ("host_of", "devices", "pids", "started", "pid_space_of"))
        and all(one >= 0 for name in ("pids", "started") for one in agreed[name])
        and texts(agreed.get("hosts"))
        and texts(agreed.get("pid_spaces"))
        and isinstance(agreed.get("addresses"), list)
        and all(isinstance(one, str | None) for one in agreed["addresses"])
        and all(0 <= one < min(len(agreed["addresses"]), len(agreed["hosts"])) for one in agreed["host_of"])
        and all(0 <= one < len(agreed["pid_spaces"]) for one in agreed["pid_space_of"])
    )
    if not well_formed:
        raise LaunchError(
            f"init_distributed: the ranks agreed on {agreed!r:.60}, which is malformed; another program writes to the "
            "store of this job: give the job a port of its own"
        )


def _device_kinds(backend: str) -> set[str]:
    if ":" in backend:
        return {part.partition(":")[0] for part in backend.split(",")}
    return {"nccl": {"cuda"}, "xccl": {"xpu"}}.get(backend, {"cpu"})
