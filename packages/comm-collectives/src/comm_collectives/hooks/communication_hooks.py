"""The reductions of this package as communication hooks of torch's DDP and FSDP2."""

# Without "from __future__ import annotations": DDP compares the annotations of a hook with these classes.
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import GradBucket, ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from comm_collectives.annotations import Group
from comm_collectives.hooks.gradient_reduction import GradientReduction
from comm_collectives.hooks.model_agreement import agree_on_model
from comm_collectives.keyword_errors import with_keyword_errors
from comm_collectives.shared_tensors import empty_shared
from comm_utils.backend import Work
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown
from comm_utils.reduce_op import ReduceOp, parse_reduce_op
from comm_utils.torch_support import factories

__all__ = ["BucketState", "ReduceScatter", "reduce_bucket", "use_reduction"]

_CALL = "use_reduction"


@with_keyword_errors
def use_reduction(model: nn.Module, reduction: GradientReduction | None = None) -> None:
    """Have a ``DistributedDataParallel`` or an FSDP2 model reduce its gradients by ``reduction``, from now on.

    Every rank calls it alike, before the first backward. It cannot be undone, as torch cannot take such hooks back.

    Args:
        model: what ``DistributedDataParallel(...)`` or ``fully_shard(...)`` made.
        reduction: None for averages as they are.

    Raises:
        ArgumentTypeError: ``model`` is neither of them.
        ArgumentError: a sum with FSDP2, in a torch that divides gradients itself in any case.
        CollectiveMismatchError: ranks of a DDP model want different reductions.
    """
    reduction = GradientReduction() if reduction is None else reduction
    if not isinstance(reduction, GradientReduction):
        raise ArgumentTypeError(f"{_CALL}: reduction: got {shown(reduction)}; expected a GradientReduction")
    if isinstance(model, DistributedDataParallel):
        agree_on_model(_CALL, {}, {"reduction": reduction}, model.process_group)
        model.register_comm_hook(BucketState(reduction, model.process_group), reduce_bucket)
        return
    modules = model.named_modules() if _is_module(model) else ()
    parts = {name: one for name, one in modules if hasattr(one, "set_custom_reduce_scatter")}
    if not parts:
        raise ArgumentTypeError(
            f"{_CALL}: model: got {type(model).__name__}; expected a DistributedDataParallel, or a model of "
            "fully_shard() in torch 2.8 and later; for other modules, call register_data_parallel_hooks()"
        )
    for name, part in cast("dict[str, Any]", parts).items():
        if reduction.op == "sum":
            if not hasattr(part, "set_force_sum_reduction_for_comms"):
                raise ArgumentError(f"{_CALL}: reduction: got op='sum'; FSDP2 of this torch averages: use op='avg'")
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        part.set_custom_reduce_scatter(ReduceScatter(reduction.of_bucket(name or "model")))


def _is_module(model: object) -> bool:
    return isinstance(model, nn.Module)


class BucketState:
    """The state of :func:`reduce_bucket`, one for each DDP model.

    Args:
        reduction: how gradients are reduced.
        group: DDP's ``process_group``.
    """

    def __init__(self, reduction: GradientReduction, group: Group = None) -> None:
        self.reduction, self.group = reduction, group
        self.started: list[tuple[Work, torch.futures.Future[torch.Tensor], torch.Tensor]] = []


def reduce_bucket(state: BucketState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Start the reduction of a bucket of DDP: the hook for ``model.register_comm_hook(BucketState(...), ...)``.

    Args:
        state: of this model.
        bucket: its buffer, (n,), is overwritten with the result.

    Returns:
        What DDP waits for; complete when the last bucket of the backward has been waited for.
    """
    if bucket.index() == 0:
        state.started.clear()  # of a backward that failed
    flat = bucket.buffer()
    make: Callable[..., Any] = torch.futures.Future
    future = make() if flat.device.type == "cpu" else make(devices=[flat.device])
    # DDP makes its buckets anew after the first backward; those of another size have another state.
    name = f"{bucket.index()}.{flat.numel()}"
    state.reduction.claim("backward", [name], state)
    reduction = state.reduction.of_bucket(name)
    state.started.append((reduction.start(flat, state.group), future, flat))
    if bucket.is_last():
        started, state.started = state.started, []
        for work, one, reduced in started:
            work.wait()
            one.set_result(reduced)
    return cast("torch.futures.Future[torch.Tensor]", future)


class ReduceScatter:
    """The ``reduce_scatter`` of FSDP2: for ``module.set_custom_reduce_scatter(...)``.

    Args:
        reduction: how gradients are reduced where FSDP2 asks for an average. Where it divides gradients itself, as
            those of float16, sums travel as the compression says.
    """

    def __init__(self, reduction: GradientReduction) -> None:
        self.reduction = reduction

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for gradients: on the CPU shared with the other ranks, so that it is reduced in place."""
        if device.type == "cpu":
            shared = empty_shared(list(size), dtype)
            if shared is not None:
                return shared
        return factories.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce ``input_tensor`` into the part of this rank.

        Args:
            output_tensor: (n,), overwritten.
            input_tensor: (W*n,), may be overwritten.
            group: this rank is a member.
            op: a sum or an average of torch.
            async_op: return a handle.
        """
        wanted = parse_reduce_op(op, "reduce_scatter of FSDP2")
        if wanted not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ArgumentError(
                f"reduce_scatter of FSDP2: op: got {shown(op)}; expected a sum or an average: leave "
                "set_gradient_divide_factor() to GradientReduction(predivide_factor=...)"
            )
        # Without the parameters that a backward does not use, FSDP2 reduces fewer elements.
        name = str(input_tensor.numel())
        self.reduction.claim("backward", [name], self)
        reduction = self.reduction.of_bucket(name)
        if wanted is ReduceOp.SUM:
            reduction = replace(reduction, op="sum", prescale=False)
        elif reduction.op == "sum":
            reduction = replace(reduction, op="avg")
        work = reduction.start_scatter(output_tensor, input_tensor, group)
        if async_op:
            return work
        work.wait()
        return None
