"""``init_distributed``: everything between the start of a process and its first collective."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.distributed as c10d
from torch.distributed import Store

import comm_config
from comm_config.rendezvous import rendezvous_settings
from comm_orchestrator import interfaces, rank_discovery, selector
from comm_orchestrator.environment import apply_variables, restore_variables
from comm_orchestrator.rendezvous.authentication import remove_secrets
from comm_orchestrator.rendezvous.init_method import without_arguments
from comm_orchestrator.rendezvous.join import join, report_to_peers
from comm_orchestrator.rendezvous.started import StartedRanks
from comm_orchestrator.report import describe, headline
from comm_utils import active, process_limits, standard_descriptors
from comm_utils.backend import Setup, without_spaces
from comm_utils.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendUnavailableError,
    CommError,
    ConfigurationError,
    NotInitializedError,
)
from comm_utils.flight_recorder import RECORDER, FlightRecorderSettings
from comm_utils.given import shown
from comm_utils.launch import LaunchInfo
from comm_utils.log import is_shown_on_stderr, logger, remember_rank, show_on_stderr
from comm_utils.rank_processes import PROCESSES
from comm_utils.watch import WATCH, WatchSettings

__all__ = [
    "InitOptions",
    "InitResult",
    "current_launch",
    "finalize",
    "initialize",
    "load_config",
    "names_comms_logger",
    "wait_for_others",
]

_START_UP_TIMEOUT = timedelta(minutes=30)
_THIS_RANK = "init_distributed: this rank"
# A report to the peers takes fewer descriptors than a world.
_DESCRIPTORS_FOR_REPORT = 12
# Two of the watch, and on rank 0 that of the store; libraries check for their own.
_THREADS = 3
# Threads reserve 8 MiB each for their stacks.
_ADDRESS_SPACE_MIB = 48


@dataclass(frozen=True)
class InitOptions:
    """The arguments of ``init_distributed``."""

    dist_backend: str | None = None
    auto_mpi_discovery: bool = True
    distributed_port: int = 29500
    verbose: bool | int = True
    timeout: float | timedelta | None = None
    init_method: str | None = None
    dist_init_required: bool | None = None
    config: Any = None
    rank: int = -1
    world_size: int = -1
    store: Store | None = None
    device: torch.device | None = None


@dataclass(frozen=True)
class InitResult:
    """The facts that ``init_distributed`` found and the settings that it chose.

    Attributes:
        fresh: the world is new to this package.
        host_of: the host of each rank, as a number; None where that is not known.
    """

    config: comm_config.Settings
    fresh: bool
    host_of: Sequence[int] | None = None


class _Current:
    launch: LaunchInfo | None = None
    # The name by which the program chose the library, which torch may know by another.
    named: str | None = None
    # None in a world of one, and in one that was adopted.
    started: StartedRanks | None = None
    # The process that began or adopted the world, and its variables then. Another one has inherited both by a fork.
    process: int | None = None
    variables: ClassVar[dict[str, str | None]] = {}


def current_launch() -> LaunchInfo | None:
    """Return the launch facts in force; None where ``torch.distributed`` was adopted or nothing is set up."""
    return _Current.launch if active.is_active() else None


def load_config(config: Any, **overrides: Any) -> comm_config.Settings:
    """Read a configuration; keywords are dotted keys with ``__`` for the dot.

    Raises:
        ConfigurationError: names the source and the key.
    """
    return _resolved(config, {name.replace("__", "."): value for name, value in overrides.items()})


def _resolved(config: Any, overrides: Mapping[str, Any], names: Mapping[str, str] = {}) -> comm_config.Settings:
    """Return the settings in force.

    Args:
        names: of the arguments of ``init_distributed``, by the key that each sets.
    """
    try:
        return comm_config.resolve(_plain(config), overrides=overrides)
    except comm_config.ConfigError as error:
        text = str(error)
        if error.source == "argument" and error.key in names:
            text = text.replace(f"argument: {error.key}", f"init_distributed: {names[error.key]}", 1)
        raise ConfigurationError(text) from error


def names_comms_logger(config: Any) -> bool:
    """Return whether ``config`` says anything about the comms logger."""
    plain = _plain(config)
    if isinstance(plain, Mapping) and "comms_logger" in plain:
        return True
    sources = load_config(config).sources
    return any(key.startswith("comms_logger.") and source != "default" for key, source in sources.items())


def _plain(config: Any) -> Any:
    """DeepSpeed's own configuration objects as what we read: their part about communication, as a dict."""
    section = getattr(config, "comms_config", config)
    if not hasattr(section, "comms_logger_enabled"):
        return config
    if not section.comms_logger_enabled:
        return {}
    keys = ("enabled", "prof_all", "prof_ops", "verbose", "debug")
    return {"comms_logger": {key: getattr(section.comms_logger, key) for key in keys}}


def wait_for_others() -> None:
    """Wait until the other ranks have started: they may still need this one, or its store."""
    if _Current.started is not None:
        _Current.started.wait()


def finalize() -> None:
    """Forget the world that has ended, and put back what was set for it."""
    active.deactivate()
    _Current.launch = _Current.named = _Current.started = _Current.process = None
    remember_rank(None)
    remove_secrets()
    restore_variables()


def _shown_level(verbose: Any) -> int | None:
    """Return the level from which on ``verbose`` shows the log on stderr; None where it does not."""
    try:  # of Python or NumPy
        if not verbose:
            return None
        return logging.DEBUG if verbose > 1 else logging.INFO
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentTypeError(
            f"init_distributed: verbose: got {shown(verbose)}; expected True, False, or 2 for all details"
        ) from None


def initialize(options: InitOptions) -> InitResult:
    """Do what ``comm_orchestrator.init_distributed`` promises, short of what concerns the collectives."""
    level = _shown_level(options.verbose)
    url, rank, world_size = without_arguments(options.init_method, options.rank, options.world_size)
    options = replace(options, init_method=url, rank=rank, world_size=world_size)
    standard_descriptors.occupy()
    if level is not None:
        show_on_stderr(level)
    elif is_shown_on_stderr():  # by an earlier call
        show_on_stderr(logging.WARNING)
    if not active.is_active() and not c10d.is_initialized():
        if options.init_method is not None and options.store is not None:
            raise ArgumentError(
                f"init_distributed: got both init_method={shown(options.init_method)} and store; expected one of them"
            )
        _check_limits_early(options)
    try:
        settings = _resolved(options.config, _overrides(options), _ARGUMENTS)
    except ConfigurationError as error:
        if not (active.is_active() or c10d.is_initialized() or options.dist_init_required is False):
            _report_to_peers(options, error)
        raise

    if active.is_active():
        if active.active_backend().is_initialized():
            _refuse_another_world_in_a_fork(options)
            found = active.active_backend().get_backend()
            if active.active_backend().get_rank() == 0:
                logger.info("init_distributed: already initialised with backend %s", found)
            _warn_if_ignored(options.dist_backend, found)
            if options.timeout is not None:
                logger.warning(
                    "init_distributed: the timeout of the world is kept, timeout=%s is ignored", options.timeout
                )
            return InitResult(settings, fresh=False)
        finalize()  # torch.distributed was destroyed under us
    if c10d.is_initialized():
        _configure_observers(settings)
        _adopt(options)
        return InitResult(settings, fresh=True)
    if options.dist_init_required is False:
        raise NotInitializedError(
            "init_distributed: got dist_init_required=False, but nothing is initialised; call init_distributed() or "
            "torch.distributed.init_process_group() before, or leave dist_init_required out"
        )
    try:
        host_of = _start(options, settings)
    except BaseException as error:
        remember_rank(None)
        PROCESSES.clear()
        _let_go(error)
        if isinstance(error, CommError) or not isinstance(error, RuntimeError):  # the former may quote another rank's
            raise
        if lack := process_limits.lack_of_threads(error):
            raise BackendUnavailableError(f"init_distributed: {lack}") from error
        raise
    return InitResult(settings, fresh=True, host_of=host_of)


def _let_go(error: BaseException) -> None:
    """Drop what the frames of a failed start hold, above all a store that serves: the next start may need its port.

    An error that such a frame holds as well would keep them until garbage is collected.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            pending += [one.__cause__, one.__context__]


#: The argument of ``init_distributed`` that sets a key.
_ARGUMENTS = {
    "process_group.backend": "dist_backend",
    "process_group.init_method": "init_method",
    "timeouts.collective_s": "timeout",
    "launch.master_port": "distributed_port",
    "launch.auto_mpi_discovery": "auto_mpi_discovery",
}


def _overrides(options: InitOptions) -> dict[str, Any]:
    """Return the settings that the program passed as arguments; None where one has its default."""
    timeout, port, asks_mpi = options.timeout, options.distributed_port, options.auto_mpi_discovery
    return {
        "process_group.backend": options.dist_backend,
        "process_group.init_method": options.init_method,
        "timeouts.collective_s": timeout.total_seconds() if isinstance(timeout, timedelta) else timeout,
        "launch.master_port": None if port == InitOptions.distributed_port else port,
        "launch.auto_mpi_discovery": None if asks_mpi is True else asks_mpi,
    }


def _report_to_peers(options: InitOptions, error: CommError) -> CommError:
    """Not leave the other ranks waiting for one that cannot come; return the error, which then names the rank."""
    with suppress(CommError, comm_config.ConfigError):
        known = rendezvous_settings(_plain(options.config), os.environ, _overrides(options))
        own_rendezvous = known.process_group.init_method is not None or options.store is not None
        launch = rank_discovery.find(os.environ, options.rank, options.world_size, known, own_rendezvous)
        error = type(error)(str(error).replace(_THIS_RANK, f"init_distributed: rank {launch.rank}", 1))
        start_s = known.timeouts.init_s
        limit = _START_UP_TIMEOUT if start_s is None else timedelta(seconds=start_s)
        report_to_peers(launch, known, limit, options.store, error)
    return error


def _check_limits_early(options: InitOptions) -> None:
    """Check the limits before the configuration is read, for which there may not be enough memory."""
    try:
        process_limits.check_address_space(_THIS_RANK, _ADDRESS_SPACE_MIB)
    except CommError as lack:
        raise _report_to_peers(options, lack) from None


def _adopt(options: InitOptions) -> None:
    active.activate(selector.adopt(str(c10d.get_backend())))
    _remember_process()
    found = active.active_backend().get_backend()  # torch calls its own choice of backends "undefined"
    remember_rank(c10d.get_rank())
    _warn_if_ignored(options.dist_backend, found)
    if options.timeout is not None:
        logger.warning(
            "init_distributed: the timeout of the adopted world is kept, timeout=%s is ignored", options.timeout
        )
    if c10d.get_rank() == 0:
        logger.info("adopted torch.distributed: backend %s, %d ranks", found, c10d.get_world_size())


def _remember_process() -> None:
    _Current.process = os.getpid()
    _Current.variables = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}


def _refuse_another_world_in_a_fork(options: InitOptions) -> None:
    """Raise where a forked child is to be a rank of a new world: it would go on with its parent's rank and world size.

    A worker of a data loader asks for no other world, and may read its parent's.
    """
    if _Current.process in (None, os.getpid()):
        return
    rank, world_size = active.active_backend().get_rank(), active.active_backend().get_world_size()
    got = {name: os.environ.get(name) for name, before in _Current.variables.items() if os.environ.get(name) != before}
    arguments = {"rank": (options.rank, rank), "world_size": (options.world_size, world_size)}
    got |= {name: str(value) for name, (value, own) in arguments.items() if value not in (-1, own)}
    if got:
        raise BackendUnavailableError(
            f"init_distributed: this process was forked from one with a world, where it is rank {rank} of "
            f"{world_size}, and got {', '.join(f'{name}={value}' for name, value in got.items())} for another world; "
            "call destroy_process_group() first, in this process or in its parent before the fork, or start "
            "processes with spawn or forkserver"
        )


def _warn_if_ignored(dist_backend: str | None, found: str) -> None:
    if dist_backend is not None and without_spaces(dist_backend).lower() not in (found, _Current.named, "auto"):
        # DeepSpeed names its accelerator's library whatever the program has chosen, and nobody can change that.
        level = logging.INFO if _caller() == "deepspeed" else logging.WARNING
        logger.log(
            level,
            "torch.distributed was already initialised with backend %s; it is kept, dist_backend=%r is ignored",
            found,
            dist_backend,
        )


def _caller() -> str:
    """Return the name of the package that calls this family of packages."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__") or "").partition(".")[0]
        if not package.startswith("comm_"):
            return package
        frame = frame.f_back
    return ""


def _configure_observers(settings: comm_config.Settings) -> None:
    """Hand the settings of the flight recorder and of the watch to them, for the world that is about to begin."""
    RECORDER.settings = FlightRecorderSettings(**vars(settings.flight_recorder))
    WATCH.settings = WatchSettings(**vars(settings.checks))


def _start(options: InitOptions, settings: comm_config.Settings) -> Sequence[int]:
    """Start a new world; return the host of each rank."""
    _configure_observers(settings)
    collective_s, start_s = settings.timeouts.collective_s, settings.timeouts.init_s
    timeout = timedelta(seconds=collective_s) if collective_s is not None else None
    start_up = timedelta(seconds=start_s) if start_s is not None else timeout or _START_UP_TIMEOUT
    own_rendezvous = settings.process_group.init_method is not None or options.store is not None
    launch = rank_discovery.find(os.environ, options.rank, options.world_size, settings, own_rendezvous)
    remember_rank(launch.rank)
    try:
        _check_limits(launch, settings.process_group.backend)
    except CommError as error:
        free = process_limits.free_descriptors()
        if free is None or free >= _DESCRIPTORS_FOR_REPORT:
            report_to_peers(launch, settings, start_up, options.store, error)
        raise
    with apply_variables(settings.variables):
        joined = join(launch, settings, start_up, options.store)
        launch, choice = joined.launch, joined.choice
        kinds = {name: name in choice.backend for name in ("ccl", "gloo")}
        network = interfaces.variables(os.environ, joined.peer, interfaces.addresses(), **kinds)
        with apply_variables(network, rank_discovery.variables(launch, os.environ)):
            PROCESSES.set_next(joined.processes)
            device = joined.bind() if options.device is None else options.device
            setup = Setup(choice.backend, launch.rank, launch.world_size, joined.point.store, timeout, device)
            active.activate(selector.activate(setup))
    _remember_process()
    _Current.started = StartedRanks(joined.point.store, launch.world_size) if launch.world_size > 1 else None
    _Current.launch, _Current.named = launch, without_spaces(settings.process_group.backend or "").lower()
    if launch.rank == 0:
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", headline(choice, launch))
        logger.debug("%s", describe(choice, launch, settings, joined.point.description))
    return joined.host_of


def _check_limits(launch: LaunchInfo, backend: str | None) -> None:
    who, local_size = f"init_distributed: rank {launch.rank}", launch.local_world_size or 1
    needed = process_limits.descriptors_to_start(launch.rank, launch.world_size, local_size, backend or "")
    process_limits.check_descriptors(who, needed)
    process_limits.check_address_space(who, _ADDRESS_SPACE_MIB)
    if launch.world_size > 1:
        process_limits.check_threads(who, _THREADS)
