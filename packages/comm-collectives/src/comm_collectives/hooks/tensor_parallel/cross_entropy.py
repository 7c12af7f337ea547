"""The cross entropy of logits whose vocabulary is divided among the ranks, without gathering them.

Shoeybi et al., 2019, section 3: ranks exchange a few numbers for each target instead of its logits. The largest logit
of all ranks is subtracted first. Label smoothing is that of ``torch.nn.functional.cross_entropy`` (Szegedy et al.,
"Rethinking the Inception Architecture for Computer Vision", 2016, section 7).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from comm_collectives.annotations import Group
from comm_collectives.collective import collective
from comm_collectives.collectives import all_reduce
from comm_collectives.compression.defaults import no_default
from comm_collectives.groups import get_rank, get_world_size
from comm_collectives.hooks.apply import apply
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = ["vocabulary_parallel_cross_entropy"]

_REDUCTIONS = ("mean", "sum", "none")


@collective(labels=False)
def vocabulary_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: Group = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the cross entropy of ``logits``, of which each rank has a part of the classes.

    Args:
        logits: (..., V / W), float; rank r has classes r * V / W to (r + 1) * V / W; only read. 16-bit floats are
            computed in float32.
        targets: (...), int64, the same on every rank; classes 0 to V - 1, or ``ignore_index``.
        group: the tensor-parallel group; None is the world group.
        ignore_index: targets with this value add nothing to the loss, and get no gradient.
        label_smoothing: 0 to 1, the share of each target that is spread over all classes.
        reduction: "mean" over the targets that are not ignored, "sum", or "none" for the shape of ``targets``.

    Returns:
        The loss, in float32 for 16-bit logits, the same on every rank.

    Raises:
        ArgumentError: shapes do not fit, or a target is no class. On an accelerator, where the check would wait for the
            device, the loss of such a target is NaN.
    """
    _check(logits, targets, label_smoothing, reduction)
    W = get_world_size(group)
    vocabulary = logits.shape[-1] * W
    ignored = targets == ignore_index
    wrong = ((targets < 0) | (targets >= vocabulary)) & ~ignored
    if targets.device.type == "cpu" and bool(wrong.any()):
        raise ArgumentError(
            f"vocabulary_parallel_cross_entropy: targets: got {int(targets[wrong][0])}; expected 0 to {vocabulary - 1} "
            f"({W} ranks with {logits.shape[-1]} classes each), or ignore_index, {ignore_index}"
        )
    losses: torch.Tensor = apply(_CrossEntropy, logits, targets, ignored, group, label_smoothing)
    if targets.device.type != "cpu":
        losses = losses.masked_fill(wrong, torch.nan)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (~ignored).sum()


def _check(logits: Any, targets: Any, label_smoothing: Any, reduction: Any) -> None:
    call = "vocabulary_parallel_cross_entropy"
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point() or not logits.dim():
        raise ArgumentTypeError(f"{call}: logits: got {shown(logits)}; expected a float tensor of shape (..., V / W)")
    if not isinstance(targets, torch.Tensor) or targets.dtype != torch.int64:
        raise ArgumentTypeError(f"{call}: targets: got {shown(targets)}; expected an int64 tensor")
    if targets.shape != logits.shape[:-1]:
        raise ArgumentError(
            f"{call}: targets: got shape {tuple(targets.shape)}; expected {tuple(logits.shape[:-1])}, that of logits "
            "without the classes"
        )
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing <= 1:
        raise ArgumentError(f"{call}: label_smoothing: got {shown(label_smoothing)}; expected 0 to 1")
    if reduction not in _REDUCTIONS:
        raise ArgumentError(f"{call}: reduction: got {shown(reduction)}; expected one of {', '.join(_REDUCTIONS)}")


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        ignored: torch.Tensor,
        group: Group,
        smoothing: float,
    ) -> torch.Tensor:
        W, part = get_world_size(group), logits.shape[-1]
        computed = torch.float64 if logits.dtype == torch.float64 else torch.float32
        largest = logits.detach().amax(-1).to(computed)
        if W > 1:
            all_reduce(largest, "max", group)
        shifted = logits.detach().to(computed) - largest.unsqueeze(-1)
        own = targets - get_rank(group) * part
        elsewhere = (own < 0) | (own >= part) | ignored
        own = own.masked_fill(elsewhere, 0)
        exponentials = shifted.exp()
        # What the ranks add up: sums of exponentials, logits of targets, and sums of logits for smoothing.
        sums = shifted.new_empty((3 if smoothing else 2, *targets.shape))
        torch.sum(exponentials, -1, out=sums[0])
        sums[1] = shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill_(elsewhere, 0.0)
        if smoothing:
            torch.sum(shifted, -1, out=sums[2])
        if W > 1:
            all_reduce(sums, "sum", group, compression=no_default(group))
        logarithm = sums[0].log()
        losses = logarithm - sums[1]
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (logarithm - sums[2] / (part * W))
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), own, elsewhere, ignored)
        ctx.smoothing, ctx.classes, ctx.dtype = smoothing, part * W, logits.dtype
        return losses.masked_fill_(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        probabilities, own, elsewhere, ignored = ctx.saved_tensors
        result = probabilities - ctx.smoothing / ctx.classes if ctx.smoothing else probabilities.clone()
        at_target = (~elsewhere).to(result.dtype) * (1 - ctx.smoothing)
        result.scatter_add_(-1, own.unsqueeze(-1), -at_target.unsqueeze(-1))
        result *= gradient.masked_fill(ignored, 0.0).unsqueeze(-1)
        return result.to(ctx.dtype), None, None, None, None
