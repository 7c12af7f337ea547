"""The high-level collective API, built on low-level reduction operations over any backend."""

from comm_collectives.all_gather import all_gather, all_gather_into_tensor
from comm_collectives.all_to_all import all_to_all, all_to_all_single
from comm_collectives.coalesced import all_gather_coalesced, all_reduce_coalesced, reduce_scatter_coalesced
from comm_collectives.coalescing import coalescing
from comm_collectives.collectives import all_reduce, barrier, broadcast, inference_all_reduce, reduce
from comm_collectives.compression import Compression
from comm_collectives.default_compression import set_compression
from comm_collectives.deterministic_reductions import set_deterministic_reductions
from comm_collectives.device_meshes import init_device_mesh, initialize_mesh_device
from comm_collectives.gather_scatter import gather, scatter
from comm_collectives.groups import (
    destroy_process_group,
    get_all_ranks_from_group,
    get_backend,
    get_global_rank,
    get_group_rank,
    get_process_group_ranks,
    get_rank,
    get_world_group,
    get_world_size,
    monitored_barrier,
    new_group,
)
from comm_collectives.hierarchical import set_hierarchical
from comm_collectives.instrumentation import bare_backend, instrument, instrumented, labelled
from comm_collectives.point_to_point import P2POp, batch_isend_irecv, irecv, isend, recv, send
from comm_collectives.reduce_scatter import reduce_scatter, reduce_scatter_tensor
from comm_collectives.shared_tensors import empty_shared, shared_memory_stats
from comm_collectives.subgroups import new_subgroups, new_subgroups_by_enumeration, split_group
from comm_collectives.wrapping import BackendWrapper

__all__ = [
    "BackendWrapper",
    "Compression",
    "P2POp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "bare_backend",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "coalescing",
    "destroy_process_group",
    "empty_shared",
    "gather",
    "get_all_ranks_from_group",
    "get_backend",
    "get_global_rank",
    "get_group_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "inference_all_reduce",
    "init_device_mesh",
    "initialize_mesh_device",
    "instrument",
    "instrumented",
    "irecv",
    "isend",
    "labelled",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "set_compression",
    "set_deterministic_reductions",
    "set_hierarchical",
    "shared_memory_stats",
    "split_group",
]
