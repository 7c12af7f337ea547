"""The API that users write against; the one module that may import the collectives.

Functions are the collectives' own, with aliases of their parameters accepted; what concerns the whole process
(``init_distributed``, ``configure`` ...) is put together here.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as c10d
from torch.distributed import GroupMember, ProcessGroup, Store

import comm_collectives
from comm_collectives import groups, object_codec, objects, summary
from comm_orchestrator import orchestrator, selector
from comm_orchestrator.aliases import accepting_aliases
from comm_utils import active
from comm_utils.backend import Availability
from comm_utils.comms_logger import CommsLogger
from comm_utils.errors import ArgumentError, ArgumentTypeError, NotInitializedError

__all__ = [
    "NON_GROUP_MEMBER",
    "GroupMember",
    "ObjectDecodeError",
    "ObjectExchangeError",
    "P2POp",
    "ProcessGroup",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_object",
    "available_backends",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object",
    "broadcast_object_list",
    "configure",
    "destroy_process_group",
    "gather",
    "gather_object",
    "get_all_ranks_from_group",
    "get_backend",
    "get_global_rank",
    "get_group_rank",
    "get_local_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "inference_all_reduce",
    "init_device_mesh",
    "init_distributed",
    "initialize_mesh_device",
    "initialize_module",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "new_group",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_object",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "reduce_scatter_tensor",
    "register_object_type",
    "reset_log",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "set_backend",
    "set_object_policy",
]


class _Log:
    comms = CommsLogger()


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: float | timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
    store: Store | None = None,
) -> None:
    """Set up distributed communication, wherever this process was started. Calling it again does nothing.

    A ``torch.distributed`` that somebody else initialised is adopted as it is. Otherwise rank information is taken from
    ``rank`` and ``world_size``, then from the launcher's environment variables, and a process that nobody launched
    together with others becomes a world of one.

    Args:
        dist_backend: a library (``"gloo"``, ``"nccl"``, ``"ccl"``, ``"cpu:gloo,cuda:nccl"``); by default the best that
            every rank can use on its device.
        auto_mpi_discovery: ask MPI, through mpi4py, where an MPI launcher started this process and its variables do not
            tell everything.
        distributed_port: the port of rank 0, where the launcher names none.
        verbose: show this package's log, at level INFO, on stderr unless the program has set up logging.
        timeout: seconds or a timedelta that an operation may take, in every group made later too; by default 30
            minutes, 10 for NCCL.
        init_method: where the ranks meet, ``"tcp://host:port"``, ``"file:///path"`` or ``"env://"``.
        dist_init_required: False raises if nothing was initialised before; None and True initialise.
        config: a dict, a path of a JSON file (DeepSpeed's are fine) or a ``comm_config.CommConfig``.
        rank, world_size: given together, they override the launcher.
        store: a ``torch.distributed.Store`` shared by all ranks, instead of meeting at an address.

    Raises:
        BackendUnavailableError: the backend that was named cannot be had.
        LaunchError: the launch environment contradicts itself or lacks a fact.
        ConfigurationError: names the source and the key.
        CommTimeoutError: not every rank arrived in time.
        NotInitializedError: ``dist_init_required=False`` and nothing is initialised.
    """
    request = orchestrator.Request(
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
    environment = orchestrator.initialize(request)
    if not environment.fresh:
        return
    settings = environment.config
    groups.forget_groups()
    object_codec.set_object_policy(settings.objects.allow_pickle, settings.objects.max_bytes)
    logging = settings.comms_logger
    configure(
        enabled=logging.enabled,
        prof_all=logging.prof_all,
        prof_ops=logging.prof_ops,
        verbose=logging.verbose,
        debug=logging.debug,
    )


def initialize_module(config: Any = None) -> None:
    """``init_distributed`` with everything taken from a configuration: a dict, a path or a ``CommConfig``."""
    init_distributed(config=config)


def is_initialized() -> bool:
    """Whether collectives can be called. Never raises."""
    return active.is_active() and active.active_backend().is_initialized()


def is_available() -> bool:
    """Whether this build of torch can communicate at all. Never raises."""
    return c10d.is_available()


def get_local_rank() -> int:
    """This process's rank among those of its host; -1 where the launcher does not say."""
    if not is_initialized():
        active.active_backend()
        raise NotInitializedError("torch.distributed was destroyed; call comm_orchestrator.init_distributed() again")
    launch = orchestrator.current_launch()
    if launch is not None and launch.local_rank is not None:
        return launch.local_rank
    return c10d.get_node_local_rank(fallback_rank=-1)


def available_backends() -> dict[str, Availability]:
    """Every library that an installed package can activate, and whether and why it can be used here."""
    return selector.available_backends()


def set_backend(name: str | None = None) -> None:
    """Check that the active backend is ``name``; a running world cannot change its library.

    Raises:
        ArgumentError: another one is active; says how to change.
        NotInitializedError: nothing is initialised.
    """
    found = comm_collectives.get_backend()
    if not (name is None or isinstance(name, str)):
        raise ArgumentTypeError(f"set_backend: name: got {name!r:.60}; expected a string such as 'gloo', or None")
    if name is not None and name.lower() != found:
        raise ArgumentError(
            f"set_backend: name: got {name!r} while {found!r} is active; call destroy_process_group() and then "
            f"init_distributed(dist_backend={name!r}), or make a group with new_group(backend={name!r})"
        )


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Free one group, or everything; after the latter ``init_distributed`` works again in this process."""
    if group is None and not is_initialized():
        active.active_backend()
        orchestrator.finalize()
        return
    groups.destroy_process_group(group)
    if group is None:
        orchestrator.finalize()


def configure(
    config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Iterable[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Turn the comms logger on or off and set what it records; None leaves a setting as it is.

    Args:
        config: a configuration whose ``comms_logger`` section is applied first.
        enabled: record from now on. Off, a call costs exactly what it costs without a logger.
        prof_all: record every operation; otherwise only those in ``prof_ops``.
        verbose: log a line for each operation.
        debug: keep calls apart by the calling function.
    """
    log = _Log.comms
    if config is not None:
        section = orchestrator.load_config(config).comms_logger
        log.verbose, log.debug = section.verbose, section.debug
        log.prof_all, log.prof_ops = section.prof_all, frozenset(section.prof_ops)
        enabled = section.enabled if enabled is None else enabled
    if prof_all is not None:
        log.prof_all = prof_all
    if isinstance(prof_ops, str):
        raise ArgumentTypeError(f"configure: prof_ops: got {prof_ops!r}; expected a list of operations, [{prof_ops!r}]")
    if prof_ops is not None:
        log.prof_ops = frozenset(prof_ops)
    if verbose is not None:
        log.verbose = verbose
    if debug is not None:
        log.debug = debug
    if enabled is not None:
        comm_collectives.instrument(observe=log if enabled else None)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the comms logger's table from rank 0: operation, size, calls, bytes, times, algbw and busbw.

    Args:
        show_straggler: add what every operation took beyond the rank that spent least time in it; all ranks call it
            then.
        return_dict: return ``{operation: {size in bytes: [{...}, ...]}}`` as well.
    """
    return summary.log_summary(_Log.comms, show_straggler, return_dict)


def reset_log() -> None:
    """Forget what the comms logger recorded."""
    _Log.comms.reset()


all_gather = comm_collectives.all_gather
all_gather_coalesced = accepting_aliases(comm_collectives.all_gather_coalesced)
all_gather_into_tensor = accepting_aliases(comm_collectives.all_gather_into_tensor)
all_gather_object = objects.all_gather_object
all_reduce = comm_collectives.all_reduce
all_reduce_coalesced = comm_collectives.all_reduce_coalesced
all_to_all = accepting_aliases(comm_collectives.all_to_all)
all_to_all_single = accepting_aliases(comm_collectives.all_to_all_single)
allgather_object = objects.allgather_object
barrier = comm_collectives.barrier
batch_isend_irecv = comm_collectives.batch_isend_irecv
broadcast = comm_collectives.broadcast
broadcast_object = objects.broadcast_object
broadcast_object_list = objects.broadcast_object_list
gather = comm_collectives.gather
gather_object = objects.gather_object
get_all_ranks_from_group = comm_collectives.get_all_ranks_from_group
get_backend = comm_collectives.get_backend
get_global_rank = comm_collectives.get_global_rank
get_group_rank = comm_collectives.get_group_rank
get_process_group_ranks = comm_collectives.get_process_group_ranks
get_rank = comm_collectives.get_rank
get_world_group = comm_collectives.get_world_group
get_world_size = comm_collectives.get_world_size
inference_all_reduce = comm_collectives.inference_all_reduce
init_device_mesh = comm_collectives.init_device_mesh
initialize_mesh_device = comm_collectives.initialize_mesh_device
irecv = comm_collectives.irecv
isend = comm_collectives.isend
monitored_barrier = comm_collectives.monitored_barrier
new_group = comm_collectives.new_group
recv = comm_collectives.recv
recv_object_list = objects.recv_object_list
reduce = comm_collectives.reduce
reduce_object = objects.reduce_object
reduce_scatter = accepting_aliases(comm_collectives.reduce_scatter)
reduce_scatter_coalesced = comm_collectives.reduce_scatter_coalesced
reduce_scatter_tensor = accepting_aliases(comm_collectives.reduce_scatter_tensor)
ObjectDecodeError = object_codec.ObjectDecodeError
ObjectExchangeError = object_codec.ObjectExchangeError
register_object_type = object_codec.register_object_type
set_object_policy = object_codec.set_object_policy
scatter = comm_collectives.scatter
scatter_object_list = objects.scatter_object_list
send = comm_collectives.send
send_object_list = objects.send_object_list
P2POp = comm_collectives.P2POp
NON_GROUP_MEMBER = GroupMember.NON_GROUP_MEMBER
