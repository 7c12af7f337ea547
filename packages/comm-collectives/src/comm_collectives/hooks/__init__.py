"""Hooks that communicate while a model trains: data-parallel, sharded, model-parallel and pipeline building blocks."""

from comm_collectives.hooks.communication_hooks import BucketState, ReduceScatter, reduce_bucket, use_reduction
from comm_collectives.hooks.data_parallel import DataParallel, DataParallelOptions, register_data_parallel_hooks
from comm_collectives.hooks.gradient_reduction import GradientReduction
from comm_collectives.hooks.handle import Handle

__all__ = [
    "BucketState",
    "DataParallel",
    "DataParallelOptions",
    "GradientReduction",
    "Handle",
    "ReduceScatter",
    "reduce_bucket",
    "register_data_parallel_hooks",
    "use_reduction",
]
