"""Collectives with compression, for arguments that are checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.distributed import ProcessGroup

from comm_collectives import reduction
from comm_collectives.compression import between_hosts, low_rank, pipeline
from comm_collectives.compression.agreement import Agreement
from comm_collectives.compression.compressed_call import CompressedCall
from comm_collectives.compression.settings import Compression
from comm_collectives.compression.states import State, find_state
from comm_collectives.memory import memory_view
from comm_utils import operations
from comm_utils.backend import Backend, Work
from comm_utils.reduce_op import ReduceOp

__all__ = ["all_gather", "all_reduce", "all_to_all", "on_tensors", "reduce_scatter"]


def all_reduce(call: CompressedCall, tensor: torch.Tensor) -> Work | None:
    """Reduce a dense ``tensor`` in place, in the order of its memory."""
    elements, compression = memory_view(tensor), call.compression
    if compression.codec is None:
        return _all_reduce_low_rank(call, tensor, elements)
    if between_hosts.suits(call, tensor):
        return between_hosts.all_reduce(call, tensor)
    sizing = call.sizing()
    owned = sizing.slices(elements.numel())[sizing.rank]
    feedback, refusal = find_state(
        lambda members: compression.feedback(tensor, tensor.numel(), owned, call.averages, members),
        call.backend,
        call.group,
    )

    def body(inner: Backend, used: ProcessGroup | None) -> None:
        if sizing.size > 1:
            pipeline.all_reduce(call.link(inner, used, refusal), elements, call.averages, feedback)
        elif feedback is not None:
            _add_losses(elements, feedback)

    return call.run_compressed(body, sizing.all_reduce_bytes(elements.numel()))


def _add_losses(elements: torch.Tensor, state: State) -> None:
    """Add what encodings have lost in a world with more ranks."""
    elements.add_(state.local)
    state.local.zero_()


def _all_reduce_low_rank(call: CompressedCall, tensor: torch.Tensor, elements: torch.Tensor) -> Work | None:
    size, rank = call.backend.get_world_size(call.group), call.compression.rank
    state, refusal = _find_low_rank(call, tensor, tensor.numel())
    shape = low_rank.memory_shape(tensor)
    count = low_rank.factor_elements(shape, rank) or tensor.numel()
    what = _describe_low_rank(call, "all_reduce", shape, tensor.dtype)

    def body(inner: Backend, used: ProcessGroup | None) -> None:
        def reduce(part: torch.Tensor) -> None:
            reduction.all_reduce(inner, part, ReduceOp.SUM, used, False, call.name)

        if size > 1:
            Agreement(inner, used, what, refusal=refusal).check()
        assert state is not None
        if size > 1:
            with torch.autocast(tensor.device.type, enabled=False):  # which would multiply in 16 bits
                low_rank.LowRankReduction(reduce, shape, call.averages, size, rank, state).all_reduce(elements)
        else:
            _add_losses(elements, state)

    return call.run_compressed(body, 2 * (size - 1) * 4 * count // size)


def _find_low_rank(call: CompressedCall, place: torch.Tensor, count: int) -> tuple[low_rank.LowRank | None, str]:
    return find_state(
        lambda members: call.compression.low_rank(place, count, call.averages, members), call.backend, call.group
    )


def _describe_low_rank(
    call: CompressedCall, collective: str, shape: torch.Size, dtype: torch.dtype, parts: str = ""
) -> str:
    average = " (avg)" if call.averages else ""
    return f"{collective}{average} of {'x'.join(map(str, shape))} {dtype}{parts} with {call.compression!r}"


def reduce_scatter(
    call: CompressedCall,
    output: torch.Tensor,
    slices: Sequence[torch.Tensor],
    place: torch.Tensor,
    shape: torch.Size,
) -> Work | None:
    """Reduce entry r of every rank's ``slices`` into ``output``, (n,), of rank r.

    Args:
        place: begins where the program's input does, of which ``slices`` may be copies.
        shape: of the elements of all slices, one after the other, for ``"powersgd"``.
    """
    compression = call.compression
    if compression.codec is None:
        return _reduce_scatter_low_rank(call, output, slices, place, shape)
    if between_hosts.suits(call, output, *slices):
        return between_hosts.reduce_scatter(call, output, slices, place)
    count = sum(one.numel() for one in slices)
    feedback, refusal = find_state(
        lambda members: compression.feedback(place, count, 0, call.averages, members), call.backend, call.group
    )
    sizing = call.sizing()
    wire_bytes = sum(sizing.wire_bytes(one.numel()) for rank, one in enumerate(slices) if rank != sizing.rank)

    def body(inner: Backend, used: ProcessGroup | None) -> None:
        if sizing.size > 1:
            pipeline.reduce_scatter(call.link(inner, used, refusal), output, slices, call.averages, feedback)
        else:
            output.copy_(slices[0])
            if feedback is not None:
                _add_losses(output, feedback)

    return call.run_compressed(body, wire_bytes)


def _reduce_scatter_low_rank(
    call: CompressedCall,
    output: torch.Tensor,
    slices: Sequence[torch.Tensor],
    place: torch.Tensor,
    shape: torch.Size,
) -> Work | None:
    size, own, rank = call.backend.get_world_size(call.group), call.backend.get_rank(call.group), call.compression.rank
    counts = [one.numel() for one in slices]
    total = sum(counts)
    state, refusal = _find_low_rank(call, place, total)
    parts = "" if len(set(counts)) == 1 else f" in parts of {', '.join(map(str, counts))}"
    what = _describe_low_rank(call, "reduce_scatter", shape, output.dtype, parts)

    def body(inner: Backend, used: ProcessGroup | None) -> None:
        def reduce(part: torch.Tensor) -> None:
            reduction.all_reduce(inner, part, ReduceOp.SUM, used, False, call.name)

        def scatter(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
            reduction.reduce_scatter(inner, target, parts, ReduceOp.SUM, used, False)

        if size > 1:
            Agreement(inner, used, what, refusal=refusal).check()
        assert state is not None
        if size > 1:
            with torch.autocast(output.device.type, enabled=False):  # which would multiply in 16 bits
                whole = low_rank.LowRankReduction(reduce, shape, call.averages, size, rank, state)
                whole.reduce_scatter(scatter, output, slices, own)
        else:
            output.copy_(slices[0])
            _add_losses(output, state)

    factors = low_rank.factor_elements(shape, rank)
    wire_bytes = 2 * (size - 1) * 4 * factors // size if factors else 4 * (total - counts[own])
    return call.run_compressed(body, wire_bytes)


def all_gather(call: CompressedCall, targets: Sequence[torch.Tensor], source: torch.Tensor) -> Work | None:
    """Overwrite ``targets[r]``, (n,), with ``source``, (n,), of rank r."""
    if between_hosts.suits(call, source, *targets):
        return between_hosts.all_gather(call, targets, source)
    sizing = call.sizing()

    def body(inner: Backend, used: ProcessGroup | None) -> None:
        if sizing.size > 1:
            pipeline.all_gather(call.link(inner, used), targets, source)
        else:
            targets[0].copy_(source)

    return call.run_compressed(body, (sizing.size - 1) * sizing.wire_bytes(source.numel()))


def all_to_all(
    call: CompressedCall,
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    plain: Callable[[Backend, ProcessGroup | None], object] | None = None,
) -> Work | None:
    """Overwrite ``targets[r]`` with the entry for this rank of the ``sources`` of rank r.

    Args:
        plain: does the same without compression, where no rank exchanges enough; None where that is known.
    """
    sizing, was_plain = call.sizing(), False
    wire_bytes = sum(sizing.wire_bytes(one.numel()) for rank, one in enumerate(sources) if rank != sizing.rank)
    least_bytes = 0 if plain is None else call.compression.settled_min_size_bytes

    def body(inner: Backend, used: ProcessGroup | None) -> None:
        nonlocal was_plain
        if not pipeline.all_to_all(call.link(inner, used), targets, sources, least_bytes, plain is None):
            assert plain is not None
            was_plain = True
            plain(inner, used)

    return call.run_compressed(body, wire_bytes, lambda: was_plain)


def on_tensors(
    operation: str,
    backend: Backend,
    whole: torch.Tensor,
    part: torch.Tensor,
    group: ProcessGroup | None,
    compression: Compression,
) -> Work | None:
    """Do any of these operations.

    Args:
        whole: (W * n,): what an all_reduce reduces, a reduce_scatter or all_to_all reads, an all_gather writes.
        part: (n,): what a reduce_scatter writes, an all_gather reads.
    """
    row, length = operations.get(operation), max(1, part.numel())
    parts, op = torch.split(whole, length), ReduceOp.SUM if row.pattern.reduces else None
    call = CompressedCall(operation, backend, group, whole, op, False, None, compression)
    if row.is_in_place:
        return all_reduce(call, whole)
    if row.pattern.reduces:
        return reduce_scatter(replace(call, counted=part), part, parts, whole, whole.shape)
    if row.pattern.input_is_part:
        return all_gather(replace(call, counted=part), parts, part)
    return all_to_all(call, torch.split(torch.empty_like(whole), length), parts)
