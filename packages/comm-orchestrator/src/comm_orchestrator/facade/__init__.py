"""The API that users write against; the one package that may import the collectives.

Functions are the collectives' own, made to understand what callers of ``deepspeed.comm`` and ``torch.distributed``
write (:mod:`.compatible`); what concerns the whole process is put together in :mod:`.world` and :mod:`.comms_log`.
"""

from torch.distributed import (
    Backend,
    FileStore,
    GradBucket,
    GroupMember,
    HashStore,
    PrefixStore,
    ProcessGroup,
    Store,
    TCPStore,
    group,
)

import comm_collectives
from comm_collectives import object_codec, objects
from comm_collectives.recorded import clocks as clocks
from comm_orchestrator.facade import comms_log, deepspeed_names
from comm_orchestrator.facade.comms_log import (
    export_log,
    get_comm_operation_count,
    get_logged_comm_ops,
    has_comm_data,
    log_rows,
    log_summary,
    log_window,
    reset_log,
    start_profiling_comms,
    start_profiling_op,
    start_telemetry,
    start_trace,
    stop_profiling_comms,
    stop_profiling_op,
    stop_trace,
)
from comm_orchestrator.facade.compatible import compatible, shortened
from comm_orchestrator.facade.deepspeed_names import (
    enable_symm_mem_for_group,
    get_local_rank_from_launcher,
    get_world_rank_from_launcher,
    get_world_size_from_launcher,
    has_all_gather_into_tensor,
    has_all_reduce_coalesced,
    has_coalescing_manager,
    has_reduce_scatter_tensor,
    in_aml,
    in_aws_sm,
    in_dlts,
    mpi_discovery,
    patch_aml_env_for_torch_nccl_backend,
    patch_aws_sm_env_for_torch_nccl_backend,
)
from comm_orchestrator.facade.world import (
    available_backends,
    destroy_process_group,
    get_local_rank,
    init_distributed,
    init_process_group,
    initialize_module,
    is_available,
    is_initialized,
    set_backend,
)
from comm_utils.backend import Work
from comm_utils.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendUnavailableError,
    BrokenGroupError,
    CollectiveMismatchError,
    CommError,
    CommTimeoutError,
    ConfigurationError,
    LaunchError,
    NotInitializedError,
    PeerLostError,
)
from comm_utils.reduce_op import ReduceOp

__all__ = [
    "NON_GROUP_MEMBER",
    "ArgumentError",
    "ArgumentTypeError",
    "Backend",
    "BackendUnavailableError",
    "BrokenGroupError",
    "CollectiveMismatchError",
    "CommError",
    "CommTimeoutError",
    "ConfigurationError",
    "FileStore",
    "GradBucket",
    "GroupMember",
    "HashStore",
    "LaunchError",
    "NotInitializedError",
    "ObjectDecodeError",
    "ObjectExchangeError",
    "P2POp",
    "PeerLostError",
    "PrefixStore",
    "ProcessGroup",
    "ReduceOp",
    "Store",
    "TCPStore",
    "Work",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "allgather_object",
    "available_backends",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object",
    "broadcast_object_list",
    "configure",
    "destroy_process_group",
    "empty_shared",
    "enable_symm_mem_for_group",
    "export_log",
    "gather",
    "gather_object",
    "get_all_ranks_from_group",
    "get_backend",
    "get_comm_operation_count",
    "get_global_rank",
    "get_group_rank",
    "get_local_rank",
    "get_local_rank_from_launcher",
    "get_logged_comm_ops",
    "get_process_group_ranks",
    "get_rank",
    "get_world_group",
    "get_world_rank_from_launcher",
    "get_world_size",
    "get_world_size_from_launcher",
    "group",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_comm_data",
    "has_reduce_scatter_tensor",
    "in_aml",
    "in_aws_sm",
    "in_dlts",
    "inference_all_reduce",
    "init_device_mesh",
    "init_distributed",
    "init_process_group",
    "initialize_mesh_device",
    "initialize_module",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_rows",
    "log_summary",
    "log_window",
    "monitored_barrier",
    "mpi_discovery",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "patch_aml_env_for_torch_nccl_backend",
    "patch_aws_sm_env_for_torch_nccl_backend",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_object",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "reduce_scatter_fn",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "register_object_type",
    "reset_log",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "set_backend",
    "shared_memory_stats",
    "set_object_policy",
    "split_group",
    "start_profiling_comms",
    "start_profiling_op",
    "start_telemetry",
    "start_trace",
    "stop_profiling_comms",
    "stop_profiling_op",
    "stop_trace",
]

all_gather = compatible(comm_collectives.all_gather)
all_gather_coalesced = compatible(comm_collectives.all_gather_coalesced)
all_gather_into_tensor = compatible(comm_collectives.all_gather_into_tensor)
all_gather_single = all_gather_into_tensor
all_reduce = shortened(compatible(comm_collectives.all_reduce))
all_reduce_coalesced = compatible(comm_collectives.all_reduce_coalesced)
all_to_all = compatible(comm_collectives.all_to_all)
all_to_all_single = compatible(comm_collectives.all_to_all_single)
allgather_fn = compatible(deepspeed_names.allgather_fn)
barrier = compatible(comm_collectives.barrier)
broadcast = compatible(comm_collectives.broadcast)
configure = compatible(comms_log.configure, labels=False)
gather = compatible(comm_collectives.gather)
inference_all_reduce = shortened(compatible(comm_collectives.inference_all_reduce))
irecv = compatible(comm_collectives.irecv)
isend = compatible(comm_collectives.isend)
monitored_barrier = compatible(comm_collectives.monitored_barrier)
recv = compatible(comm_collectives.recv)
reduce = compatible(comm_collectives.reduce)
reduce_scatter = compatible(comm_collectives.reduce_scatter)
reduce_scatter_coalesced = compatible(comm_collectives.reduce_scatter_coalesced)
reduce_scatter_fn = compatible(deepspeed_names.reduce_scatter_fn)
reduce_scatter_single = reduce_scatter_tensor = compatible(comm_collectives.reduce_scatter_tensor)
scatter = compatible(comm_collectives.scatter)
send = compatible(comm_collectives.send)

all_gather_object = compatible(objects.all_gather_object)
allgather_object = objects.allgather_object
broadcast_object = objects.broadcast_object
broadcast_object_list = compatible(objects.broadcast_object_list)
gather_object = objects.gather_object
recv_object_list = objects.recv_object_list
reduce_object = objects.reduce_object
scatter_object_list = objects.scatter_object_list
send_object_list = objects.send_object_list
register_object_type = object_codec.register_object_type
set_object_policy = object_codec.set_object_policy
ObjectDecodeError = object_codec.ObjectDecodeError
ObjectExchangeError = object_codec.ObjectExchangeError

batch_isend_irecv = comm_collectives.batch_isend_irecv
get_all_ranks_from_group = comm_collectives.get_all_ranks_from_group
get_backend = comm_collectives.get_backend
get_global_rank = comm_collectives.get_global_rank
get_group_rank = comm_collectives.get_group_rank
get_process_group_ranks = comm_collectives.get_process_group_ranks
empty_shared = comm_collectives.empty_shared
shared_memory_stats = comm_collectives.shared_memory_stats
get_rank = comm_collectives.get_rank
get_world_group = comm_collectives.get_world_group
get_world_size = comm_collectives.get_world_size
init_device_mesh = comm_collectives.init_device_mesh
initialize_mesh_device = comm_collectives.initialize_mesh_device
new_group = comm_collectives.new_group
new_subgroups = comm_collectives.new_subgroups
new_subgroups_by_enumeration = comm_collectives.new_subgroups_by_enumeration
split_group = comm_collectives.split_group
P2POp = comm_collectives.P2POp
NON_GROUP_MEMBER = GroupMember.NON_GROUP_MEMBER
