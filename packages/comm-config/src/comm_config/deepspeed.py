"""DeepSpeed's documents: which they are, and which part of them is ours."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from comm_config.errors import closest, shorten
from comm_config.models import CommConfig

__all__ = ["DEEPSPEED_KEYS", "is_deepspeed", "log_training", "our_part", "written_key"]

DEEPSPEED_KEYS = frozenset(
    {
        "activation_checkpointing",
        "aio",
        "amp",
        "autotuning",
        "bf16",
        "bfloat16",
        "check_overflow",
        "checkpoint",
        "checkpoint_serialization",
        "comet",
        "compile",
        "compression_training",
        "csv_monitor",
        "curriculum_learning",
        "data_efficiency",
        "data_types",
        "dataloader_drop_last",
        "datastates_ckpt",
        "disable_allgather",
        "dump_state",
        "eigenvalue",
        "elasticity",
        "expert_parallel",
        "flops_profiler",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_allreduce_op",
        "gradient_clipping",
        "gradient_predivide_factor",
        "graph_harvesting",
        "hybrid_engine",
        "log_level",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "nebula",
        "optimizer",
        "pipeline",
        "prescale_gradients",
        "progressive_layer_drop",
        "quantize_training",
        "scheduler",
        "sequence_parallel_size",
        "sparse_attention",
        "sparse_gradients",
        "steps_per_print",
        "tensor_parallel",
        "tensorboard",
        "timers",
        "torch_autocast",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "use_data_before_expert_parallelism",
        "vocabulary_size",
        "wall_clock_breakdown",
        "wandb",
        "weight_quantization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "zero_optimization",
    }
)
"""Top-level keys of DeepSpeed 0.19 and earlier that are not ours too."""

_EDITOR_KEY = "$schema"

# Where DeepSpeed's document has the keys of our section `training`: at the top, and in one of its own sections.
_TRAINING = "training"
_AT_THE_TOP = ("prescale_gradients", "gradient_predivide_factor", "sparse_gradients")
_SECTION = "zero_optimization"
_IN_THE_SECTION = ("stage", "reduce_bucket_size", "allgather_bucket_size", "overlap_comm")
_logger = logging.getLogger("comm")
_logged: set[str] = set()


def is_deepspeed(document: Mapping[str, Any]) -> bool:
    """Return whether ``document`` has a top-level key that only DeepSpeed knows."""
    return any(key in DEEPSPEED_KEYS for key in document)


def our_part(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the top-level keys of ``document`` that are to be validated.

    Of DeepSpeed's document these are ours and those that look like a slip in one of ours; of any other document
    all of them. ``$schema``, which editors read, is left out.
    """
    foreign = is_deepspeed(document)
    ours = {
        key: value
        for key, value in document.items()
        if key != _EDITOR_KEY and not (foreign and isinstance(key, str) and not _meant_for_us(key))
    }
    training, explicit = _training_part(document), ours.get(_TRAINING, {})
    if training and isinstance(explicit, Mapping):
        ours[_TRAINING] = {**training, **explicit}
    return ours


def _training_part(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return our section `training` of what DeepSpeed's document has in other places; null stands for nothing."""
    section = document.get(_SECTION)
    found = {key: document[key] for key in _AT_THE_TOP if key in document}
    if isinstance(section, Mapping):
        found.update({key: section[key] for key in _IN_THE_SECTION if key in section})
    return {key: value for key, value in found.items() if value is not None}


def written_key(document: Mapping[str, Any], key: str) -> str:
    """Return the dotted key under which ``document`` has our setting ``key``."""
    section, _, name = key.partition(".")
    explicit = document.get(_TRAINING)
    if section != _TRAINING or (isinstance(explicit, Mapping) and name in explicit):
        return key
    return name if name in _AT_THE_TOP else f"{_SECTION}.{name}" if name in _IN_THE_SECTION else key


def log_training(document: Mapping[str, Any], source: str) -> None:
    """Log once in a process for each of DeepSpeed's settings of training what serves it; collectives ignore them."""
    found = {key: value for key, value in _training_part(document).items() if key not in _logged and value != "auto"}
    if found:
        _logged.update(found)
        settings = ", ".join(f"{key}={shorten(value)}" for key, value in found.items())
        _logger.info(
            "%s: %s: served by initialize_module(config, model), and for stage 0 by "
            "register_data_parallel_hooks(model, config)",
            source,
            settings,
        )


def _meant_for_us(key: str) -> bool:
    return closest(key, [*DEEPSPEED_KEYS, *CommConfig.model_fields], cutoff=0.85) in CommConfig.model_fields
