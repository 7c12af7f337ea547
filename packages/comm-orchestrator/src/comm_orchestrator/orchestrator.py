"""``init_distributed``: everything between the start of a process and its first collective."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as c10d
from torch.distributed import Store

import comm_config
from comm_orchestrator import devices, selector
from comm_orchestrator.environment import applied, given
from comm_orchestrator.rendezvous import meet
from comm_utils import active
from comm_utils.backend import Setup
from comm_utils.errors import ConfigurationError, LaunchError, NotInitializedError
from comm_utils.launch import LaunchInfo, discover
from comm_utils.launch.info import integer
from comm_utils.log import logger, remember_rank, show_on_stderr

__all__ = ["Environment", "current_launch", "initialize"]

_START_UP_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Environment:
    """What ``init_distributed`` found and settled."""

    config: comm_config.CommConfig
    launch: LaunchInfo | None
    fresh: bool


class _Current:
    launch: LaunchInfo | None = None


def current_launch() -> LaunchInfo | None:
    """The launch facts in force; None where ``torch.distributed`` was adopted or nothing is set up."""
    return _Current.launch if active.is_active() else None


def load_config(config: Any, **overrides: Any) -> comm_config.CommConfig:
    """Read a configuration; keywords are dotted keys with ``__`` for the dot.

    Raises:
        ConfigurationError: names the source and the key.
    """
    dotted = {name.replace("__", "."): value for name, value in overrides.items() if value is not None}
    try:
        return comm_config.load_config(config, overrides=dotted)
    except comm_config.ConfigError as error:
        raise ConfigurationError(str(error)) from error


def initialize(
    dist_backend: str | None,
    distributed_port: int,
    verbose: bool,
    timeout: float | timedelta | None,
    init_method: str | None,
    dist_init_required: bool | None,
    config: Any,
    rank: int,
    world_size: int,
    store: Store | None,
) -> Environment:
    """Do what ``comm_orchestrator.init_distributed`` promises, short of what concerns the collectives."""
    if verbose:
        show_on_stderr()
    settings = load_config(
        config,
        process_group__backend=dist_backend,
        process_group__init_method=init_method,
        timeouts__collective_s=timeout.total_seconds() if isinstance(timeout, timedelta) else timeout,
        launch__master_port=None if distributed_port == 29500 else distributed_port,
    )
    if active.is_active():
        if active.active_backend().is_initialized():
            found = active.active_backend().get_backend()
            logger.info("init_distributed: already initialised with backend %s", found)
            _warn_if_ignored(dist_backend, found)
            return Environment(settings, _Current.launch, fresh=False)
        active.deactivate()  # torch.distributed was destroyed under us
    if c10d.is_initialized():
        _adopt(dist_backend)
        if timeout is not None:
            logger.warning("init_distributed: the timeout of the adopted world is kept, timeout=%s is ignored", timeout)
        return Environment(settings, None, fresh=True)
    if dist_init_required is False:
        raise NotInitializedError(
            "dist_init_required=False, but nothing is initialised; call torch.distributed.init_process_group() first, "
            "or leave dist_init_required out"
        )
    launch = _launch(rank, world_size)
    _start(settings, launch, store)
    return Environment(settings, launch, fresh=True)


def _adopt(dist_backend: str | None) -> None:
    active.activate(selector.adopt(str(c10d.get_backend())))
    found = active.active_backend().get_backend()  # torch calls its own choice of backends "undefined"
    _Current.launch = None
    remember_rank(c10d.get_rank())
    _warn_if_ignored(dist_backend, found)
    if c10d.get_rank() == 0:
        logger.info("adopted torch.distributed: backend %s, %d ranks", found, c10d.get_world_size())


def _warn_if_ignored(dist_backend: str | None, found: str) -> None:
    if dist_backend is not None and dist_backend.lower() != found:
        logger.warning(
            "torch.distributed was already initialised with backend %s; it is kept, dist_backend=%r is ignored",
            found,
            dist_backend,
        )


def _launch(rank: int, world_size: int) -> LaunchInfo:
    if rank < 0 and world_size < 0:
        return discover(os.environ)
    if rank < 0 or world_size < 0:
        given, missing = ("rank", "world_size") if world_size < 0 else ("world_size", "rank")
        raise LaunchError(f"init_distributed: got {given} without {missing}; pass both, or neither")
    variables = {"local_rank": "LOCAL_RANK", "local_world_size": "LOCAL_WORLD_SIZE"}
    local = {name: integer(os.environ, variable) for name, variable in variables.items() if variable in os.environ}
    return LaunchInfo(
        "arguments",
        rank,
        world_size,
        master_addr=os.environ.get("MASTER_ADDR"),
        master_port=integer(os.environ, "MASTER_PORT") if "MASTER_PORT" in os.environ else None,
        sources={
            "rank": "argument rank",
            "world_size": "argument world_size",
            "master_addr": "environment variable MASTER_ADDR",
        },
        **local,
    )


def _start(settings: comm_config.CommConfig, launch: LaunchInfo, store: Store | None) -> None:
    collective_s, start_s = settings.timeouts.collective_s, settings.timeouts.init_s
    timeout = timedelta(seconds=collective_s) if collective_s is not None else None
    start_up = timedelta(seconds=start_s) if start_s is not None else timeout or _START_UP_TIMEOUT
    named = settings.process_group.backend
    choice = selector.choose(named) if named is not None else None
    if settings.launch.master_addr is not None:
        where = comm_config.sources_of(settings)["launch.master_addr"]
        launch = replace(
            launch, master_addr=settings.launch.master_addr, sources={**launch.sources, "master_addr": where}
        )
    remember_rank(launch.rank)
    try:
        with applied(comm_config.network_environment(settings, given())):
            init_method = settings.process_group.init_method
            met = meet(launch, init_method, settings.launch.master_port, start_up, store)
            kind = devices.device_type()
            if choice is None:
                choice = selector.choose_automatically(kind, met, launch.rank, launch.world_size)
            device = devices.bind_device(kind, launch.local_rank) if kind in _device_kinds(choice.backend) else None
            active.activate(
                selector.activate(Setup(choice.backend, launch.rank, launch.world_size, met, timeout, device))
            )
    except BaseException:
        remember_rank(None)
        raise
    _Current.launch = launch
    if launch.rank == 0:
        logger.info("%s", _report(choice, launch, settings, store))


def _device_kinds(backend: str) -> set[str]:
    if ":" in backend:
        return {part.partition(":")[0] for part in backend.split(",")}
    return {"nccl": {"cuda"}, "xccl": {"xpu"}}.get(backend, {"cpu"})


def _report(choice: selector.Choice, launch: LaunchInfo, settings: comm_config.CommConfig, store: Store | None) -> str:
    """What was set up, and in brackets where each fact came from."""
    sources = comm_config.sources_of(settings)
    why = sources["process_group.backend"] if settings.process_group.backend is not None else choice.reason
    ranks = "1 rank" if launch.world_size == 1 else f"{launch.world_size} ranks"
    facts = [f"backend {choice.backend} ({why})", f"{ranks} ({launch.sources.get('world_size', launch.launcher)})"]
    if store is not None:
        facts.append("met in a store (argument)")
    elif settings.process_group.init_method is not None:
        facts.append(f"met at {settings.process_group.init_method} ({sources['process_group.init_method']})")
    elif launch.master_addr is not None:
        address = f"{launch.master_addr}:{launch.master_port or settings.launch.master_port}"
        facts.append(f"met at {address} ({launch.sources.get('master_addr', launch.launcher)})")
    if settings.timeouts.collective_s is not None:
        facts.append(f"timeout {settings.timeouts.collective_s:g} s ({sources['timeouts.collective_s']})")
    return "initialised: " + ", ".join(facts)
