"""Hooks that communicate while a model trains: data-parallel, sharded, model-parallel and pipeline building blocks."""

from comm_collectives.hooks.data_parallel import DataParallel, DataParallelOptions, register_data_parallel_hooks
from comm_collectives.hooks.gradient_reduction import GradientReduction
from comm_collectives.hooks.handle import Handle

__all__ = ["DataParallel", "DataParallelOptions", "GradientReduction", "Handle", "register_data_parallel_hooks"]
