"""The norm of gradients of which each rank has a part, and clipping to it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from comm_collectives.annotations import Group
from comm_collectives.collectives import all_reduce
from comm_collectives.compression.defaults import no_default
from comm_utils.errors import ArgumentError
from comm_utils.torch_support import factories

__all__ = ["clip_to_norm", "total_norm"]

# As torch.nn.utils.clip_grad_norm_.
_EPSILON = 1e-6


def total_norm(
    call: str,
    gradients: Sequence[torch.Tensor],
    norm_type: float,
    group: Group,
    dtypes: Collection[torch.dtype],
    device: torch.device,
) -> torch.Tensor:
    """Return the norm of the gradients of all ranks together.

    Args:
        call: the user's call, for messages.
        gradients: this rank's, any shapes and float dtypes, on one kind of device; only read.
        norm_type: the order, above 0; ``math.inf`` is the largest absolute value.
        group: whose ranks have a part each.
        dtypes: of the gradients of all ranks, as a rank may have none of one.
        device: of the result, of one kind on all ranks.

    Returns:
        (), float32, or float64 where ``dtypes`` has such precision; the same on every rank.

    Raises:
        ArgumentError: the order is not above 0.
    """
    order = float(norm_type)
    if not order > 0:
        raise ArgumentError(f"{call}: norm_type: got {norm_type}; expected a number above 0, or math.inf")
    dtype = torch.float64 if {torch.float64, torch.complex128} & set(dtypes) else torch.float32
    absolute = [one.abs() if one.is_complex() else one for one in gradients]
    norms = [torch.linalg.vector_norm(one, order, dtype=dtype).to(device) for one in absolute]
    if math.isinf(order):
        total = torch.stack(norms).amax() if norms else factories.zeros((), dtype=dtype, device=device)
        # Libraries differ in what the maximum of a NaN and a number is.
        is_nan = total.isnan()
        largest = torch.stack([total.masked_fill(is_nan, 0.0), is_nan.to(dtype)])
        all_reduce(largest, "max", group)
        return largest[0].masked_fill(largest[1] > 0, math.nan)
    total = (torch.stack(norms) ** order).sum() if norms else factories.zeros((), dtype=dtype, device=device)
    all_reduce(total, "sum", group, compression=no_default(group))
    return total ** (1 / order)


def clip_to_norm(gradients: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Multiply ``gradients``, which are overwritten, so that their norm of ``norm`` is at most ``max_norm``."""
    factor = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for one in gradients:
        one.mul_(factor.to(one.device))
