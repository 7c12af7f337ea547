"""The world of this process: setting it up, asking about it, taking it down."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup, Store

import comm_collectives
import comm_config
from comm_collectives import arguments, groups, object_codec
from comm_collectives.checked import CheckingBackend
from comm_collectives.compression.settings import configure_seq_parallel
from comm_collectives.hierarchy.choice import set_setting
from comm_collectives.hierarchy.layout import set_hosts
from comm_collectives.hooks.stored_settings import forget_settings
from comm_collectives.keyword_errors import with_keyword_errors
from comm_collectives.reduction.order import Order, order_of
from comm_orchestrator import orchestrator, selector
from comm_orchestrator.facade import comms_log
from comm_utils import active
from comm_utils.backend import Availability
from comm_utils.errors import ArgumentError, ArgumentTypeError, CommError, NotInitializedError
from comm_utils.log import logger
from comm_utils.process_locks import ProcessLock

__all__ = [
    "available_backends",
    "destroy_process_group",
    "get_local_rank",
    "init_distributed",
    "init_process_group",
    "is_available",
    "is_initialized",
    "set_backend",
]


# The threads of a process begin and end worlds one after the other.
_turn = ProcessLock(threading.RLock)


@with_keyword_errors
def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool | int = True,
    timeout: float | timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
    store: Store | None = None,
) -> None:
    """Set up distributed communication, wherever this process was started. Calling it again does nothing.

    A later call applies one section of its ``config``, and only where that differs from the first call's: the
    ``comms_logger``, as DeepSpeed does. Of threads that call it at once, one sets it up and the others wait for that.

    A ``torch.distributed`` that somebody else initialised is adopted as it is. Otherwise rank information is taken from
    ``rank`` and ``world_size``, then from the launcher's environment variables, and a process that nobody launched
    together with others becomes a world of one.

    Args:
        dist_backend: a library (``"gloo"``, ``"nccl"``, ``"ccl"``, ``"cpu:gloo,cuda:nccl"``); by default the best that
            every rank can use on its device.
        auto_mpi_discovery: ask MPI, through mpi4py, where an MPI launcher started this process and its variables do not
            tell everything.
        distributed_port: the port of rank 0, where the launcher names none.
        verbose: show this package's log, at level INFO, on stderr unless the program has set up logging; 2 for level
            DEBUG, which has every fact of the start with its source.
        timeout: seconds or a timedelta that an operation may take, in every group made later too; by default 30
            minutes, or 10 on ``"nccl"`` alone.
        init_method: where the ranks meet, ``"tcp://host:port"``, ``"file:///path"`` or ``"env://"``, also with
            ``rank`` and ``world_size``, as in ``"tcp://host:port?rank=0&world_size=2"``.
        dist_init_required: False raises if nothing was initialised before; None and True initialise.
        config: a dict, a path of a JSON file (DeepSpeed's are fine) or a ``comm_config.CommConfig``.
        rank, world_size: given together, they override the launcher.
        store: a ``torch.distributed.Store`` shared by all ranks, instead of a rendezvous at an address.

    Raises:
        BackendUnavailableError: the backend that was named cannot be had.
        LaunchError: the launch environment contradicts itself or lacks a fact.
        ConfigurationError: names the source and the key.
        ArgumentError: some rank cannot write ``comms_logger.trace`` of the configuration; no rank has a world then.
        CommTimeoutError: not every rank arrived in time.
        NotInitializedError: ``dist_init_required=False`` and nothing is initialised.
    """
    _initialize(
        orchestrator.InitOptions(
            dist_backend,
            auto_mpi_discovery,
            distributed_port,
            verbose,
            timeout,
            init_method,
            dist_init_required,
            config,
            rank,
            world_size,
            store,
        )
    )


@with_keyword_errors
def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: float | timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
) -> None:
    """:func:`init_distributed` by ``torch.distributed``'s name and parameters, for programs that come from there.

    Args:
        backend, init_method, timeout, world_size, rank, store: as for :func:`init_distributed`.
        group_name: ignored, as torch does.
        pg_options: must be None; initialise ``torch.distributed`` with them, and ``init_distributed`` adopts it.
        device_id: the device to bind to, or its index; by default the one of the local rank.

    Raises:
        CommError: as for :func:`init_distributed`.
        ArgumentError: ``pg_options`` were given; or a world exists already, as in torch.
    """
    call = "init_process_group"
    if pg_options is not None:
        raise ArgumentError(
            f"{call}: pg_options: got {pg_options!r:.60}; expected None: call torch.distributed.init_process_group() "
            "with them, and init_distributed() then adopts what it made"
        )
    with _turn.lock:
        if is_initialized() or c10d.is_initialized():
            raise ArgumentError(
                f"{call}: there is a world already; call destroy_process_group() first, or init_distributed(), which "
                "keeps it"
            )
        device = None if device_id is None else _device(call, device_id)
        _initialize(
            orchestrator.InitOptions(
                backend,
                verbose=False,
                timeout=timeout,
                init_method=init_method,
                rank=rank,
                world_size=world_size,
                store=store,
                device=device,
            )
        )


def _device(call: str, device_id: torch.device | int) -> torch.device | None:
    """Return the device to bind to; None where that is the CPU, to which nothing is bound."""
    if isinstance(device_id, int) and not isinstance(device_id, bool):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return None if accelerator is None else torch.device(accelerator.type, device_id)
    if not isinstance(device_id, torch.device):
        raise ArgumentTypeError(f"{call}: device_id: got {device_id!r:.60}; expected a torch.device or its index")
    return None if device_id.type == "cpu" else device_id


def _initialize(options: orchestrator.InitOptions) -> None:
    with _turn.lock:
        _initialize_alone(options)


def _initialize_alone(options: orchestrator.InitOptions) -> None:
    """Begin a world, or keep the one that is there; for a caller that has the turn."""
    result = orchestrator.initialize(options)
    settings = result.config
    if not result.fresh:
        if options.config is not None:
            _read_by_a_running_world(settings)
        return
    try:
        _apply(result)
    except BaseException:
        _take_back()
        raise
    _Applied.settings = settings


def _apply(result: orchestrator.InitResult) -> None:
    """Make a new world what its configuration says."""
    settings = result.config
    groups.forget_groups()
    set_hosts(result.host_of)
    _set_hierarchical(settings)
    _compress(settings)
    _order_reductions(settings)
    if settings.checks.mismatch == "strict":
        comm_collectives.instrument(CheckingBackend, *comm_collectives.instrumented())
    object_codec.set_object_policy(settings.objects.allow_pickle, settings.objects.max_bytes)
    comms_log.begin(settings)
    comms_log.begin_trace(settings)


def _take_back() -> None:
    """End a world whose configuration cannot be applied; one that was adopted stays with those who began it."""
    with suppress(CommError, RuntimeError):  # the first error matters more
        if orchestrator.current_launch() is None:
            comms_log.end()
            orchestrator.finalize()
        else:
            _end_world()


class _Applied:
    """The configuration that the world began with."""

    settings: comm_config.Settings | None = None


def _read_by_a_running_world(settings: comm_config.Settings) -> None:
    """Apply the comms logger of a configuration that is another than the world's, as DeepSpeed does, and no more."""
    world = _Applied.settings
    if comms_log.named_by_program(settings) and (world is None or settings.comms_logger != world.comms_logger):
        comms_log.begin(settings)
    if world is None:
        return
    kept = set(settings.changes(world))
    kept -= {key for key in kept if key.startswith(("comms_logger.", "training.")) and key != "comms_logger.trace"}
    if settings.process_group.backend == comm_collectives.get_backend():  # which the world may have found by itself
        kept.discard("process_group.backend")
    if kept:
        logger.warning(
            "init_distributed: the world keeps its settings; config has others, which are ignored: %s; call "
            "destroy_process_group() first",
            ", ".join(sorted(kept)),
        )


def _set_hierarchical(settings: comm_config.Settings) -> None:
    wanted = settings.hierarchical
    if not wanted.enabled or wanted.min_size_bytes is not None:
        set_setting(wanted.min_size_bytes if wanted.enabled else None, None)


def _compress(settings: comm_config.Settings) -> None:
    """Compress what the configuration says; nothing changes where it says nothing."""
    if settings.compression is not None:
        comm_collectives.set_compression(comm_collectives.Compression(**settings.compression))
    if settings.seq_parallel_compression is not None:
        configure_seq_parallel(comm_collectives.Compression(**settings.seq_parallel_compression))


def _order_reductions(settings: comm_config.Settings) -> None:
    """Make reductions deterministic where the configuration says so; nothing changes where it says nothing."""
    if _order_wanted(settings) not in (None, order_of(None)):
        comm_collectives.set_deterministic_reductions(compensated=settings.reductions.compensated)


def _order_wanted(settings: comm_config.Settings) -> Order | None:
    if settings.reductions.compensated:
        return Order.COMPENSATED
    return Order.FIXED if settings.reductions.deterministic else None


def is_initialized() -> bool:
    """Return whether collectives can be called. Never raises."""
    return active.is_active() and active.active_backend().is_initialized()


def is_available() -> bool:
    """Return whether this build of torch can communicate at all. Never raises."""
    return c10d.is_available()


def get_local_rank() -> int:
    """Return this process's rank among those of its host; -1 where the launcher does not say.

    Raises:
        NotInitializedError: nothing is initialised.
    """
    if not is_initialized():
        arguments.active("get_local_rank")
        raise NotInitializedError(
            "get_local_rank: torch.distributed was destroyed; call comm_orchestrator.init_distributed() again"
        )
    launch = orchestrator.current_launch()
    if launch is not None and launch.local_rank is not None:
        return launch.local_rank
    return c10d.get_node_local_rank(fallback_rank=-1)


def available_backends() -> dict[str, Availability]:
    """Return every library that an installed package can activate, and whether and why it can be used here."""
    return selector.available_backends()


@with_keyword_errors
def set_backend(name: str | None = None) -> None:
    """Check that the active backend is ``name``; a running world cannot change its library.

    Args:
        name: of a library, such as ``"gloo"``; None accepts any.

    Raises:
        ArgumentError: another one is active; says how to change.
        NotInitializedError: nothing is initialised.
    """
    arguments.active("set_backend")
    found = comm_collectives.get_backend()
    if not (name is None or isinstance(name, str)):
        raise ArgumentTypeError(f"set_backend: name: got {name!r:.60}; expected a string such as 'gloo', or None")
    if name is not None and name.lower() != found:
        raise ArgumentError(
            f"set_backend: name: got {name!r} while {found!r} is active; call destroy_process_group() and then "
            f"init_distributed(dist_backend={name!r}), or make a group with new_group(backend={name!r})"
        )


@with_keyword_errors
def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Free one group, or everything; after the latter ``init_distributed`` works again in this process."""
    if group is not None:
        groups.destroy_process_group(group)
        return
    with _turn.lock:
        _end_world()


def _end_world() -> None:
    """Free everything; for a caller that has the turn."""
    if not is_initialized():
        arguments.active("destroy_process_group")
        comms_log.end()
    else:
        comms_log.end()
        orchestrator.wait_for_others()
        forget_settings()
        groups.destroy_process_group()
    orchestrator.finalize()
