"""Tensor parallelism: layers of which each rank computes a part, and what they need."""

from comm_collectives.hooks.tensor_parallel.broadcast_data import broadcast_data
from comm_collectives.hooks.tensor_parallel.cross_entropy import vocabulary_parallel_cross_entropy
from comm_collectives.hooks.tensor_parallel.model import ModelParallel, register_model_parallel_hooks
from comm_collectives.hooks.tensor_parallel.regions import (
    copy_to_tensor_parallel_region,
    gather_from_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    scatter_to_tensor_parallel_region,
)
from comm_collectives.hooks.tensor_parallel.sequence import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    sum_gradients,
)

__all__ = [
    "ModelParallel",
    "broadcast_data",
    "copy_to_tensor_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_parallel_region",
    "reduce_from_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "register_model_parallel_hooks",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_parallel_region",
    "sum_gradients",
    "vocabulary_parallel_cross_entropy",
]
