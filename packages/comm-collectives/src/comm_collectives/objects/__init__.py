"""Python objects between ranks, without pickle unless it is allowed."""

from comm_collectives.objects.collective import (
    all_gather_object,
    allgather_object,
    broadcast_object,
    broadcast_object_list,
    gather_object,
    scatter_object_list,
)
from comm_collectives.objects.point_to_point import recv_object_list, send_object_list
from comm_collectives.objects.reducing import reduce_object

__all__ = [
    "all_gather_object",
    "allgather_object",
    "broadcast_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "reduce_object",
    "scatter_object_list",
    "send_object_list",
]
