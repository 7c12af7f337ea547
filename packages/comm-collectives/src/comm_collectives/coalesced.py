"""Many tensors in one exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch

from comm_collectives import reduction
from comm_collectives.annotations import Group, Op, Timeout
from comm_collectives.arguments import check_dtype, check_list, check_numel, check_tensor, enter
from comm_collectives.collective import collective
from comm_collectives.hierarchy.choice import with_hierarchy
from comm_collectives.memory import (
    as_bytes,
    concatenate,
    contiguous_elements,
    copyable,
    memory_view,
    overlapping,
    used_here,
)
from comm_collectives.reduction import encoding_for
from comm_collectives.work import Completed, deliver
from comm_utils.backend import Backend, Work
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.reduce_op import parse_reduce_op
from comm_utils.torch_support.passed_tensors import passing_bytes, passing_joined

__all__ = ["all_gather_coalesced", "all_reduce_coalesced", "interleave", "reduce_scatter_coalesced"]


@overload
def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Op = "sum",
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    timeout: Timeout = None,
) -> None: ...
@overload
def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Op = "sum",
    group: Group = None,
    async_op: Literal[True] = ...,
    *,
    timeout: Timeout = None,
) -> Work: ...
@overload
def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None: ...
@collective(("tensors",), "op")
def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """``all_reduce`` of many tensors, one exchange for each dtype among them.

    Args:
        tensors: any shapes, dense, the same list on every rank; overwritten with the results.
        op: as for ``all_reduce``.
    """
    call = "all_reduce_coalesced"
    backend = enter(call, group, timeout)
    if backend is None:
        return None
    _check_tensors(call, "tensors", tensors, backend, group, written=True)
    reduce_op = parse_reduce_op(op, call)
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        encoding_for(call, reduce_op, tensor.dtype, backend.capabilities(group, tensor.device.type))
        kinds.setdefault((tensor.dtype, tensor.device), []).append(memory_view(tensor))
    if len(kinds) > 1 and _share_memory(list(kinds.values())):
        raise ArgumentError(
            f"{call}: tensors: got tensors of different dtypes that share memory; expected separate memory for each"
        )
    works, finishes = [], []
    for parts in kinds.values():
        joined = concatenate(parts) if len(parts) > 1 else parts[0]
        view = with_hierarchy("all_reduce", backend, group, joined.nbytes, joined.device)
        with passing_joined(parts):
            works.append(reduction.all_reduce(view, joined, reduce_op, group, async_op))
        if len(parts) > 1:
            finishes.append(_splitter(joined, parts))
    return deliver(works, _all_of(finishes), list(tensors), async_op)


@overload
def all_gather_coalesced(
    output_tensors: Sequence[Any],
    input_tensors: Sequence[torch.Tensor],
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    timeout: Timeout = None,
) -> None: ...
@overload
def all_gather_coalesced(
    output_tensors: Sequence[Any],
    input_tensors: Sequence[torch.Tensor],
    group: Group = None,
    async_op: Literal[True] = ...,
    *,
    timeout: Timeout = None,
) -> Work: ...
@overload
def all_gather_coalesced(
    output_tensors: Sequence[Any],
    input_tensors: Sequence[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None: ...
@collective()
def all_gather_coalesced(
    output_tensors: Sequence[Any],
    input_tensors: Sequence[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """``all_gather`` of many tensors, of any mix of dtypes, in one exchange.

    Args:
        output_tensors: for each input, either one tensor of W times its elements or a list of W tensors of its size. If
            there are only lists, they are one for each rank, as in torch: ``output_tensors[rank][input]``. Overwritten.
        input_tensors: any shapes and dtypes on one device, the same on every rank; only read.
    """
    call = "all_gather_coalesced"
    backend = enter(call, group, timeout)
    if backend is None:
        return None
    _check_tensors(call, "input_tensors", input_tensors, backend, group)
    if not isinstance(output_tensors, (list, tuple)):
        raise ArgumentTypeError(f"{call}: output_tensors: got {type(output_tensors).__name__}; expected a list")
    W, given = backend.get_world_size(group), output_tensors
    if given and all(isinstance(entry, (list, tuple)) for entry in given):
        output_tensors = _by_input(call, given, len(input_tensors), W)
    if len(output_tensors) != len(input_tensors):
        raise ArgumentError(
            f"{call}: output_tensors: got a list of {len(output_tensors)}; expected {len(input_tensors)}, one an input"
        )
    for position, (output, source) in enumerate(zip(output_tensors, input_tensors, strict=True)):
        name = f"output_tensors[{position}]"
        if isinstance(output, torch.Tensor):
            check_tensor(call, name, output, backend, group, written=True)
            check_dtype(call, name, output, source)
            check_numel(call, name, output, W * source.numel(), f"{source.numel()} elements from each of {W} ranks")
        else:
            check_list(call, name, output, W, backend, group, like=source, written=True)
            for rank, part in enumerate(output):
                check_numel(call, f"{name}[{rank}]", part, source.numel(), "the size of the input")
    written: list[torch.Tensor] = []
    for output in output_tensors:
        written += [output] if isinstance(output, torch.Tensor) else output
    if overlapping(written):
        raise ArgumentError(
            f"{call}: output_tensors: got tensors that share memory; expected one memory for each output"
        )
    if not input_tensors:
        return Completed([]) if async_op else None
    sent = concatenate([as_bytes(contiguous_elements(tensor), frozenset()) for tensor in input_tensors])
    received = sent.new_empty(W, sent.numel())
    sizes = [tensor.numel() * tensor.element_size() for tensor in input_tensors]

    def finish() -> None:
        columns = torch.split(received, sizes, dim=1)
        for output, source, column in zip(output_tensors, input_tensors, columns, strict=True):
            # A row may start at an odd byte; cloning aligns it for the wider dtype.
            parts = [copyable(row.clone().view(source.dtype)) for row in column]
            if isinstance(output, torch.Tensor):
                copyable(output.detach()).copy_(concatenate(parts).view(output.shape))
            else:
                for target, part in zip(output, parts, strict=True):
                    copyable(target.detach()).copy_(part.view(target.shape))
        used_here(received)

    backend = with_hierarchy("all_gather_into_tensor", backend, group, received.nbytes, sent.device)
    with passing_bytes(input_tensors):
        work = backend.all_gather_into_tensor(received.view(-1), sent, group, async_op)
    return deliver([work], finish, list(given), async_op)


def _share_memory(kinds: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Return whether any two dense tensors of different ``kinds`` share memory."""
    spans = sorted(
        (start := one.data_ptr(), start + one.nbytes, kind)
        for kind, parts in enumerate(kinds)
        for one in parts
        if one.numel()
    )
    ends: dict[int, int] = {}
    for start, end, kind in spans:
        if any(start < other for of, other in ends.items() if of != kind):
            return True
        ends[kind] = max(end, ends.get(kind, 0))
    return False


def _by_input(call: str, lists: Sequence[Sequence[Any]], count: int, W: int) -> list[list[Any]]:
    if len(lists) != W:
        raise ArgumentError(
            f"{call}: output_tensors: got {len(lists)} lists; expected {W}, one for each rank of the group"
        )
    for rank, entries in enumerate(lists):
        if len(entries) != count:
            raise ArgumentError(
                f"{call}: output_tensors[{rank}]: got a list of {len(entries)}; expected {count} tensors, one an input"
            )
    return [list(parts) for parts in zip(*lists, strict=True)]


@overload
def reduce_scatter_coalesced(
    tensors: Sequence[torch.Tensor],
    group: Group = None,
    op: Op = "avg",
    async_op: Literal[False] = False,
    *,
    timeout: Timeout = None,
) -> list[torch.Tensor]: ...
@overload
def reduce_scatter_coalesced(
    tensors: Sequence[torch.Tensor],
    group: Group = None,
    op: Op = "avg",
    async_op: Literal[True] = ...,
    *,
    timeout: Timeout = None,
) -> Work: ...
@overload
def reduce_scatter_coalesced(
    tensors: Sequence[torch.Tensor],
    group: Group = None,
    op: Op = "avg",
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> list[torch.Tensor] | Work: ...
@collective()
def reduce_scatter_coalesced(
    tensors: Sequence[torch.Tensor],
    group: Group = None,
    op: Op = "avg",
    async_op: bool = False,
    *,
    timeout: Timeout = None,
) -> Any:
    """Reduce many tensors and return this rank's part of each, in one exchange for each dtype among them.

    The result is the average, as in DeepSpeed, whose function this is.

    Args:
        tensors: any shapes, the same list on every rank; only read. A tensor of n elements is cut into parts of
            ceil(n / W); the last ones may be shorter or empty.
        op: as for ``all_reduce``.

    Returns:
        One-dimensional tensors, in the order of ``tensors``; with ``async_op`` a handle whose ``result()`` they are.
    """
    call = "reduce_scatter_coalesced"
    backend = enter(call, group, timeout)
    if backend is None:
        return None
    _check_tensors(call, "tensors", tensors, backend, group)
    reduce_op = parse_reduce_op(op, call)
    W, rank = backend.get_world_size(group), backend.get_rank(group)
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for position, tensor in enumerate(tensors):
        encoding_for(call, reduce_op, tensor.dtype, backend.capabilities(group, tensor.device.type))
        kinds.setdefault((tensor.dtype, tensor.device), []).append(position)
    results: list[Any] = [None] * len(tensors)
    works = []
    for positions in kinds.values():
        parts = [math.ceil(tensors[position].numel() / W) for position in positions]
        joined = interleave([contiguous_elements(tensors[position]) for position in positions], parts, W)
        output = joined.new_empty(sum(parts))
        view = with_hierarchy("reduce_scatter_tensor", backend, group, joined.nbytes, joined.device)
        with passing_joined([tensors[position] for position in positions]):
            works.append(reduction.reduce_scatter_tensor(view, output, joined, reduce_op, group, async_op, call))
        for position, part, piece in zip(positions, parts, torch.split(output, parts), strict=True):
            results[position] = piece[: max(0, min(part, tensors[position].numel() - rank * part))]
    return deliver(works, None, results, True) if async_op else results


def interleave(tensors: list[torch.Tensor], parts: list[int], W: int) -> torch.Tensor:
    """Part r of every tensor, padded with zeros, before part r+1 of any: (W * sum(parts),)."""
    joined = tensors[0].new_zeros(W, sum(parts))
    for tensor, part, column in zip(tensors, parts, torch.split(joined, parts, dim=1), strict=True):
        full = tensor.numel() // part if part else 0
        column[:full].copy_(tensor[: full * part].view(full, part))
        rest = tensor[full * part :]
        if rest.numel():
            column[full, : rest.numel()].copy_(rest)
    return joined.view(-1)


def _check_tensors(
    call: str, name: str, tensors: Any, backend: Backend, group: Group, *, written: bool = False
) -> None:
    if not isinstance(tensors, (list, tuple)):
        raise ArgumentTypeError(f"{call}: {name}: got {type(tensors).__name__}; expected a list of tensors")
    for position, tensor in enumerate(tensors):
        check_tensor(call, f"{name}[{position}]", tensor, backend, group, written=written)


def _splitter(joined: torch.Tensor, parts: list[torch.Tensor]) -> Callable[[], None]:
    def finish() -> None:
        for part, result in zip(parts, torch.split(joined, [part.numel() for part in parts]), strict=True):
            part.copy_(result)
        used_here(joined)

    return finish


def _all_of(finishes: list[Callable[[], None]]) -> Callable[[], None] | None:
    if not finishes:
        return None

    def finish() -> None:
        for one in finishes:
            one()

    return finish
