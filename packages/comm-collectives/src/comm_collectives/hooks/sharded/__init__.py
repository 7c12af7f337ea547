"""Sharded training, what ZeRO asks of a communication layer (Rajbhandari et al. 2020, stages 1 to 3)."""

from comm_collectives.hooks.sharded.checkpoint_tensor import CheckpointTensor
from comm_collectives.hooks.sharded.handle import Sharded
from comm_collectives.hooks.sharded.memory_use import MemoryUse
from comm_collectives.hooks.sharded.partition import partition, partition_range, unpartition
from comm_collectives.hooks.sharded.registration import register_sharded_hooks

__all__ = [
    "CheckpointTensor",
    "MemoryUse",
    "Sharded",
    "partition",
    "partition_range",
    "register_sharded_hooks",
    "unpartition",
]
