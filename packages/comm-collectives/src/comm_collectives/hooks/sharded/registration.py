"""Sharded training: optimizer state, gradients and parameters of which each rank has a part (ZeRO, stages 1 to 3)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from comm_collectives.annotations import Group
from comm_collectives.arguments import is_member
from comm_collectives.hooks.gradient_reduction import GradientReduction
from comm_collectives.hooks.handle import (
    check_module,
    check_unregistered,
    trainable_parameters,
)
from comm_collectives.hooks.model_agreement import check_on_all_ranks
from comm_collectives.hooks.other_reductions import refuse_reduced
from comm_collectives.hooks.sharded.freed_parameter import refuse_kinds
from comm_collectives.hooks.sharded.handle import Sharded
from comm_collectives.keyword_errors import with_keyword_errors
from comm_collectives.reduce_scatter import reduce_scatter_tensor
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = ["register_sharded_hooks"]

_CALL = "register_sharded_hooks"
_BUCKET_SIZE_BYTES = 25 << 20


@with_keyword_errors
def register_sharded_hooks(
    model: nn.Module,
    stage: int,
    group: Group = None,
    bucket_size_bytes: int = _BUCKET_SIZE_BYTES,
    reduction: GradientReduction | None = None,
    prefetch: bool = True,
) -> Sharded | None:
    """Give each rank of ``group`` a part of the optimizer's state, the gradients and the parameters of ``model``.

    Every rank of the group calls it, with the same model; the values are those of the first rank. The optimizer is
    built afterwards, from :meth:`Sharded.parameter_groups`.

    Args:
        model: its parameters that require gradients, of any float or complex dtypes, move to flat memory; in stage 3,
            the others as well. Tied parameters count once.
        stage: 1 divides the optimizer's state, 2 also the gradients, 3 also the parameters.
        group: None is the world group.
        bucket_size_bytes: a bucket of gradients ends with the parameter that makes it as large. In stage 3, modules
            with at most that many bytes of parameters are gathered as one.
        reduction: how gradients are reduced; None averages them.
        prefetch: in stage 3, gather the parameters of the next modules in the background.

    Returns:
        The handle; its ``remove()`` gives an ordinary model back. None on a rank that is not in ``group``.

    Raises:
        CollectiveMismatchError: on all ranks, if models or settings differ; names the rank and the first difference.
        ArgumentError: an unknown stage; a parameter has such hooks already, or none requires a gradient; ``model`` or a
            module in it is one of DDP or FSDP2; gradients cannot be compressed as ``reduction`` says; on the other
            ranks, that a rank refused its arguments.
        ArgumentTypeError: ``model`` is no module, or a parameter has no shape yet or wraps other tensors.
    """
    if not is_member(_CALL, group):
        return None
    chosen = GradientReduction() if reduction is None else reduction

    def prepare() -> tuple[Mapping[str, torch.Tensor], Mapping[str, object]]:
        _check_settings(stage, bucket_size_bytes, chosen, prefetch)
        refuse_reduced(_CALL, check_module(_CALL, model))
        trainable = trainable_parameters(_CALL, model)
        refuse_kinds(_CALL, dict(model.named_parameters()) if stage == 3 else trainable)
        check_unregistered(_CALL, trainable, group=group, model=model)
        if stage == 3:
            _refuse_compiled(model)
        chosen.check_compression(_CALL, reduce_scatter_tensor, trainable, group)
        settings = {"stage": stage, "bucket_size_bytes": bucket_size_bytes, "reduction": chosen, "prefetch": prefetch}
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}, settings

    check_on_all_ranks(_CALL, prepare, group)
    return Sharded(model, stage, group, bucket_size_bytes, chosen, prefetch)


def _check_settings(stage: object, bucket_size_bytes: object, reduction: object, prefetch: object) -> None:
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise ArgumentError(
            f"{_CALL}: stage: got {shown(stage)}; expected 1 (optimizer state), 2 (and gradients) or 3 (and parameters)"
        )
    if isinstance(bucket_size_bytes, bool) or not isinstance(bucket_size_bytes, int):
        raise ArgumentTypeError(
            f"{_CALL}: bucket_size_bytes: got {shown(bucket_size_bytes)}; expected a number of bytes"
        )
    if bucket_size_bytes < 1:
        raise ArgumentError(f"{_CALL}: bucket_size_bytes: got {bucket_size_bytes}; expected 1 byte or more")
    if not isinstance(reduction, GradientReduction):
        raise ArgumentTypeError(f"{_CALL}: reduction: got {shown(reduction)}; expected a GradientReduction")
    if not isinstance(prefetch, bool):
        raise ArgumentTypeError(f"{_CALL}: prefetch: got {shown(prefetch)}; expected True or False")


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ArgumentError(
                f"{_CALL}: model: got module {name!r} compiled by torch.compile; expected stage 1 or 2, whose "
                "parameters are not freed, or a model that is not compiled"
            )
