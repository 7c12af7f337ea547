"""Hooks that communicate while a model trains: data-parallel, sharded, model-parallel and pipeline building blocks."""

from comm_collectives.hooks.communication_hooks import BucketState, ReduceScatter, reduce_bucket, use_reduction
from comm_collectives.hooks.data_parallel import DataParallel, DataParallelOptions, register_data_parallel_hooks
from comm_collectives.hooks.gradient_reduction import GradientReduction
from comm_collectives.hooks.handle import Handle
from comm_collectives.hooks.sharded import (
    CheckpointTensor,
    MemoryUse,
    Sharded,
    partition,
    partition_range,
    register_sharded_hooks,
    unpartition,
)

__all__ = [
    "BucketState",
    "CheckpointTensor",
    "DataParallel",
    "DataParallelOptions",
    "GradientReduction",
    "Handle",
    "MemoryUse",
    "ReduceScatter",
    "Sharded",
    "partition",
    "partition_range",
    "reduce_bucket",
    "register_data_parallel_hooks",
    "register_sharded_hooks",
    "unpartition",
    "use_reduction",
]
