"""Hooks of training from a configuration, and the one call that sets up a process and its model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

import comm_config
from comm_collectives import arguments, hooks
from comm_collectives.hooks.stored_settings import (
    DATA_PARALLEL,
    MODEL_PARALLEL,
    STAGE,
    has_settings,
    store_settings,
    stored_settings,
)
from comm_collectives.keyword_errors import with_keyword_errors
from comm_orchestrator import orchestrator
from comm_orchestrator.facade.world import init_distributed
from comm_utils.errors import ArgumentError, ArgumentTypeError, CommError

__all__ = [
    "initialize_module",
    "register_communication_hooks",
    "register_data_parallel_hooks",
    "register_model_parallel_hooks",
    "register_sharded_hooks",
]

# DeepSpeed counts elements of buckets.
_ELEMENT_BYTES = 4
_DEFAULT_BUCKET_BYTES = 25 << 20
#: Names of the dimension of a mesh along which ranks have the same parameters, and along which these are divided.
_DATA = ("data", "dp", "data_parallel")
_TENSOR = ("tensor", "tp", "model", "mp", "tensor_parallel")


@with_keyword_errors
def initialize_module(config: Any = None, model: nn.Module | None = None, mesh: Any = None) -> hooks.Handle | None:
    """Set up distributed communication and register the hooks of ``model``, all by a configuration.

    The section ``training`` chooses the hooks. With a ``model_parallel_plan`` and a mesh that has a dimension
    ``"tensor"``, layers are divided first; with a plan and no mesh, all ranks divide them, and there are no other
    hooks. Then stage 0 registers data-parallel hooks, stages 1 to 3 sharded ones. The gradients of a
    ``DistributedDataParallel`` or an FSDP2 model are reduced by the same settings. Without ``model``, the settings are
    stored for a later :func:`register_data_parallel_hooks` or :func:`register_model_parallel_hooks`; those of the
    environment alone do not replace what was stored before.

    Args:
        config: as for :func:`init_distributed`.
        model: None only sets up communication.
        mesh: a ``DeviceMesh`` or a process group, for the ranks that have the same parameters: the one dimension, or
            that which is called ``"data"`` or ``"dp"``; None is the world group.

    Returns:
        The handle of the hooks; None without ``model``, for a DDP or FSDP2 model, or on a rank outside of the group.

    Raises:
        CommError: as for :func:`init_distributed` and the functions that register hooks.
    """
    init_distributed(config=config)
    call = "initialize_module"
    if model is None:
        if mesh is not None:
            raise ArgumentError(f"{call}: mesh: got one without a model; expected both, or leave mesh out")
        if config is not None or not has_settings():
            register_communication_hooks(config)
        return None
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"{call}: model: got {type(model).__name__}; expected a torch.nn.Module")
    settings = orchestrator.load_config(config).training
    if _has_torchs_hooks(model):
        if settings.stage:
            raise ArgumentError(
                f"{call}: model: got a {type(model).__name__} together with stage {settings.stage}; expected a plain "
                "module, or stage 0"
            )
        hooks.use_reduction(model, _reduction(settings))
        return None
    group = _data_group(call, mesh)
    divided: hooks.Handle | None = None
    if settings.model_parallel_plan and (mesh is None or _dimension(mesh, _TENSOR) is not None):
        divided = register_model_parallel_hooks(model, mesh, settings.model_parallel_plan)
        if mesh is None:  # all ranks divide the model, and none has the parameters of another
            return divided
    try:
        handle = _register_by_stage(model, settings, group)
    except CommError:  # which all ranks get
        if divided is not None:
            divided.remove()
        raise
    if handle is not None and divided is not None:
        handle.after_removal(divided.remove)  # hooks give back the parts that it makes whole
    return handle


def _has_torchs_hooks(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel) or hasattr(model, "set_requires_gradient_sync")


def _register_by_stage(model: nn.Module, settings: Any, group: ProcessGroup | None) -> hooks.Handle | None:
    if settings.stage == 0:
        return hooks.register_data_parallel_hooks(model, _options(settings), group)
    size = settings.reduce_bucket_size or settings.allgather_bucket_size
    register: Any = _registered_by("register_sharded_hooks", "initialize_module")
    handle: hooks.Handle | None = register(
        model,
        stage=settings.stage,
        group=group,
        bucket_size_bytes=size * _ELEMENT_BYTES if size else _DEFAULT_BUCKET_BYTES,
        reduction=_reduction(settings),
    )
    return handle


def _registered_by(name: str, call: str) -> Any:
    found = getattr(hooks, name, None)
    if found is None:
        raise ArgumentError(f"{call}: this release of comm-collectives has no hooks.{name}(); install a later one")
    return found


@with_keyword_errors
def register_data_parallel_hooks(
    model: Any,
    config: Any = None,
    group: ProcessGroup | None = None,
    ignored_parameters: Iterable[str | nn.Parameter] | None = None,
) -> hooks.DataParallel | None:
    """Reduce the gradients of ``model`` over the ranks of ``group`` in every backward from now on.

    See :func:`comm_collectives.hooks.register_data_parallel_hooks`. With a configuration alone, its settings are stored
    for the next calls without one.

    Args:
        model: a module; or a configuration, and nothing else.
        config: ``hooks.DataParallelOptions``, or as for :func:`init_distributed`; None for what was stored, else the
            default settings.
        group: None is the world group.
        ignored_parameters: names or parameters that get no hooks and are not broadcast.

    Returns:
        The handle, whose ``remove()`` takes the hooks off again; None where settings were stored, or on a rank that is
        not in ``group``.

    Raises:
        CommError: as :func:`comm_collectives.hooks.register_data_parallel_hooks`.
        ConfigurationError: names the source and the key.
    """
    call = "register_data_parallel_hooks"
    if _is_configuration(model):
        _nothing_else(call, config=config, group=group, ignored_parameters=ignored_parameters)
        store_settings(DATA_PARALLEL, _data_parallel_options(call, model))
        store_settings(STAGE, 0)
        return None
    if config is None:
        _refuse_stage(f"{call}: stored settings", stored_settings(STAGE))
        options = stored_settings(DATA_PARALLEL)
    else:
        options = _data_parallel_options(call, config)
    return hooks.register_data_parallel_hooks(model, options, group, ignored_parameters)


@with_keyword_errors
def register_sharded_hooks(
    model: nn.Module, stage: int, group: ProcessGroup | None = None, **options: Any
) -> hooks.Sharded | None:
    """Give each rank of ``group`` a part of the optimizer's state, the gradients and the parameters of ``model``.

    See :func:`comm_collectives.hooks.register_sharded_hooks`.

    Args:
        model: a module.
        stage: 1 divides the optimizer's state, 2 also the gradients, 3 also the parameters.
        group: None is the world group.
        options: what else :func:`comm_collectives.hooks.register_sharded_hooks` takes.

    Returns:
        The handle; its ``remove()`` gives an ordinary model back. None on a rank that is not in ``group``.

    Raises:
        CommError: as the function of ``comm_collectives.hooks``.
    """
    arguments.active("register_sharded_hooks")
    return hooks.register_sharded_hooks(model, stage, group, **options)


@with_keyword_errors
def register_model_parallel_hooks(module: Any, groups: Any = None, plan: Any = None, **options: Any) -> Any:
    """Divide layers of ``module`` among the ranks of a tensor-parallel group, in place, by ``plan``.

    See ``comm_collectives.hooks.register_model_parallel_hooks``. With a configuration alone, its
    ``training.model_parallel_plan`` is stored for the next calls without a plan.

    Args:
        module: a module; or a configuration, and nothing else.
        groups: the groups, a ``DeviceMesh`` or a process group; None is the world group.
        plan: styles by pattern of module names; None for what was stored.
        options: what else ``comm_collectives.hooks.register_model_parallel_hooks`` takes.

    Returns:
        The handle, whose ``remove()`` takes the hooks off again; None where settings were stored.

    Raises:
        CommError: as the function of ``comm_collectives.hooks``.
        ConfigurationError: names the source and the key.
    """
    call = "register_model_parallel_hooks"
    if _is_configuration(module):
        _nothing_else(call, groups=groups, plan=plan, **options)
        store_settings(MODEL_PARALLEL, dict(orchestrator.load_config(module).training.model_parallel_plan) or None)
        return None
    arguments.active(call)
    plan = stored_settings(MODEL_PARALLEL) if plan is None else plan
    return _registered_by(call, call)(module, groups, plan, **options)


@with_keyword_errors
def register_communication_hooks(config: Any) -> None:
    """Store the settings of a configuration for hooks that are registered later, data-parallel and model-parallel ones.

    With a stage of 1 to 3, :func:`register_data_parallel_hooks` without a configuration raises ``ArgumentError``.

    Args:
        config: as for :func:`init_distributed`.

    Raises:
        ConfigurationError: names the source and the key.
    """
    settings = orchestrator.load_config(config).training
    store_settings(DATA_PARALLEL, _options(settings))
    store_settings(STAGE, settings.stage)
    store_settings(MODEL_PARALLEL, dict(settings.model_parallel_plan) or None)


def _is_configuration(given: object) -> bool:
    kinds = (Mapping, str, os.PathLike, comm_config.Settings)
    return isinstance(given, kinds) or type(given).__name__ == "CommConfig"  # whose import takes a tenth of a second


def _nothing_else(call: str, **others: object) -> None:
    for name, value in others.items():
        if value is not None:
            raise ArgumentError(f"{call}: {name}: got one with a configuration alone; expected a module before it")


def _data_parallel_options(call: str, config: Any) -> hooks.DataParallelOptions:
    if isinstance(config, hooks.DataParallelOptions):
        return config
    settings = orchestrator.load_config(config).training
    _refuse_stage(f"{call}: config", settings.stage)
    return _options(settings)


def _refuse_stage(where: str, stage: int | None) -> None:
    if stage:
        raise ArgumentError(
            f"{where}: got stage {stage}; expected 0: initialize_module(config, model) and "
            "register_sharded_hooks(model, stage) register sharded hooks"
        )


def _reduction(settings: Any) -> hooks.GradientReduction:
    return hooks.GradientReduction(
        prescale=settings.prescale_gradients, predivide_factor=settings.gradient_predivide_factor
    )


def _options(settings: Any) -> hooks.DataParallelOptions:
    size_bytes = settings.reduce_bucket_size * _ELEMENT_BYTES if settings.reduce_bucket_size else _DEFAULT_BUCKET_BYTES
    return hooks.DataParallelOptions(
        reduction=_reduction(settings),
        bucket_size_bytes=size_bytes,
        first_bucket_size_bytes=min(1 << 20, size_bytes),
        overlap=settings.overlap_comm,
        sparse_gradients=settings.sparse_gradients,
    )


def _dimension(mesh: Any, names: tuple[str, ...]) -> str | None:
    """Return the name of the dimension of ``mesh`` that is one of ``names``; None where there is none."""
    return next((one for one in getattr(mesh, "mesh_dim_names", None) or () if one in names), None)


def _data_group(call: str, mesh: Any) -> ProcessGroup | None:
    if mesh is None or isinstance(mesh, ProcessGroup):
        return mesh
    if not hasattr(mesh, "get_group") or not hasattr(mesh, "ndim"):
        raise ArgumentTypeError(f"{call}: mesh: got {type(mesh).__name__}; expected a DeviceMesh or a process group")
    name = _dimension(mesh, _DATA)
    if name is None and mesh.ndim > 1:
        raise ArgumentError(
            f"{call}: mesh: got one of dimensions {mesh.mesh_dim_names}; expected one that is called 'data' or 'dp'"
        )
    group: ProcessGroup = mesh.get_group() if name is None else mesh.get_group(name)
    return group
