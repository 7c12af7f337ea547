"""Hooks that communicate while a model trains: data-parallel, sharded, model-parallel and pipeline building blocks."""

from comm_collectives.hooks.communication_hooks import BucketState, ReduceScatter, reduce_bucket, use_reduction
from comm_collectives.hooks.context_parallel import (
    RingExchange,
    join_context,
    ring_attention,
    ring_exchange,
    split_context,
)
from comm_collectives.hooks.data_parallel import DataParallel, DataParallelOptions, register_data_parallel_hooks
from comm_collectives.hooks.expert_parallel import ExpertBatch, dispatch_to_experts, expert_all_to_all, top_k_routing
from comm_collectives.hooks.gradient_reduction import GradientReduction
from comm_collectives.hooks.handle import Handle
from comm_collectives.hooks.parallel_groups import ParallelGroup, ParallelGroups
from comm_collectives.hooks.pipeline import (
    Schedule,
    ScheduleReport,
    TiedParameter,
    check_schedule,
    forward_only,
    gpipe,
    interleaved,
    one_forward_one_backward,
    run_schedule,
    schedule_of,
    tie_parameter,
)
from comm_collectives.hooks.tensor_parallel import (
    ModelParallel,
    broadcast_data,
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    register_model_parallel_hooks,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_parallel_region,
    sum_gradients,
    vocabulary_parallel_cross_entropy,
)

__all__ = [
    "BucketState",
    "DataParallel",
    "DataParallelOptions",
    "ExpertBatch",
    "GradientReduction",
    "Handle",
    "ModelParallel",
    "ParallelGroup",
    "ParallelGroups",
    "ReduceScatter",
    "RingExchange",
    "Schedule",
    "ScheduleReport",
    "TiedParameter",
    "broadcast_data",
    "check_schedule",
    "copy_to_tensor_parallel_region",
    "dispatch_to_experts",
    "expert_all_to_all",
    "forward_only",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_parallel_region",
    "gpipe",
    "interleaved",
    "join_context",
    "one_forward_one_backward",
    "reduce_bucket",
    "reduce_from_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "register_data_parallel_hooks",
    "register_model_parallel_hooks",
    "ring_attention",
    "ring_exchange",
    "run_schedule",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_parallel_region",
    "schedule_of",
    "split_context",
    "sum_gradients",
    "tie_parameter",
    "top_k_routing",
    "use_reduction",
    "vocabulary_parallel_cross_entropy",
]
