"""Sparse gradients of embeddings: ranks exchange the rows that they have, and add them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from comm_collectives.all_gather import all_gather_into_tensor
from comm_collectives.annotations import Group
from comm_collectives.compression.defaults import no_default
from comm_collectives.groups import get_world_size
from comm_collectives.hooks.gradient_reduction import GradientReduction
from comm_utils.torch_support import factories

__all__ = ["reduce_rows", "sparse_parameters"]

_NO_GRADIENT = -1


def sparse_parameters(model: nn.Module) -> set[torch.Tensor]:
    """Return the weights of the embeddings of ``model`` that were made with ``sparse=True``."""
    return {one.weight for one in model.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.sparse}


def reduce_rows(
    gradients: Sequence[torch.Tensor | None],
    parameters: Sequence[torch.Tensor],
    reduction: GradientReduction,
    group: Group = None,
) -> list[torch.Tensor | None]:
    """Return the sums or averages over all ranks of gradients that have some rows each.

    Every rank sends as many rows as the one that has most of them, as it is done by ``sparse_allreduce`` of
    DeepSpeed's engine and for DDP by gloo.

    Args:
        gradients: sparse tensors with one sparse dimension, or dense ones; None where this rank has none. Ranks may
            have different numbers of rows.
        parameters: what the gradients are of, for their shapes, dtypes and devices.
        reduction: rows travel as they are, whatever its compression or the group's default.
        group: this rank is a member; None is the world group.

    Returns:
        Coalesced sparse tensors, or dense ones where a rank has such, the same on every rank; None where no rank has a
        gradient.
    """
    if not parameters:
        return []
    W = get_world_size(group)
    scaling = reduction.scaling(group)
    rows = [None if one is None else _rows(one) for one in gradients]
    device = parameters[0].device
    numbers = [_NO_GRADIENT if one is None else one._nnz() for one in rows]
    are_dense = [one is not None and not one.is_sparse for one in gradients]
    own = factories.tensor([numbers, are_dense], dtype=torch.int64, device=device)
    counts = own.new_empty(W, *own.shape)
    all_gather_into_tensor(counts.view(-1), own.view(-1), group)
    by_rank: list[list[list[int]]] = counts.tolist()
    reduced: list[torch.Tensor | None] = []
    for place, (one, parameter) in enumerate(zip(rows, parameters, strict=True)):
        of_ranks = [of_rank[place] for of_rank, _ in by_rank]
        if max(of_ranks) == _NO_GRADIENT:
            reduced.append(None)
            continue
        indices, values = _gathered(one, parameter, max(0, *of_ranks), scaling.before, W, group)
        kept = [rank for rank in range(W) if of_ranks[rank] > 0]
        # The sum may exceed the range of 16 bits where what is divided afterwards does not.
        added = torch.promote_types(values.dtype, torch.float32)
        total = torch.sparse_coo_tensor(
            torch.cat([indices[rank, : of_ranks[rank]] for rank in kept]).unsqueeze(0) if kept else indices[:1, :0],
            torch.cat([values[rank, : of_ranks[rank]] for rank in kept]).to(added) if kept else values[0, :0].to(added),
            parameter.shape,
        ).coalesce()
        scaled = total.values() if scaling.after == 1 else total.values().mul_(scaling.after)
        result = torch.sparse_coo_tensor(total.indices(), scaled.to(values.dtype), parameter.shape, is_coalesced=True)
        # As autograd adds dense and sparse gradients of one parameter.
        reduced.append(result.to_dense() if any(of_rank[place] for _, of_rank in by_rank) else result)
    return reduced


def _rows(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.detach()
    return (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()


def _gathered(
    rows: torch.Tensor | None, parameter: torch.Tensor, most: int, before: float, W: int, group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices, (W, most), and the rows, (W, most, ...), of all ranks, padded with zeros."""
    indices = factories.zeros(most, dtype=torch.int64, device=parameter.device)
    values = factories.zeros(most, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    if rows is not None and rows._nnz():
        indices[: rows._nnz()] = rows.indices()[0]
        torch.mul(rows.values(), before, out=values[: rows._nnz()])
    all_indices = indices.new_empty(W, most)
    all_values = values.new_empty(W, *values.shape)
    if most:
        all_gather_into_tensor(all_indices.view(-1), indices, group)
        all_gather_into_tensor(all_values.view(-1), values.view(-1), group, compression=no_default(group))
    return all_indices, all_values
