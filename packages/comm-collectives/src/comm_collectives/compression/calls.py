"""Collectives with compression, for arguments that are checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_collectives import composed, reduction
from comm_collectives.compression import between_hosts, low_rank, pipeline
from comm_collectives.compression.agreement import Agreement
from comm_collectives.compression.link import Link
from comm_collectives.compression.settings import Compression
from comm_collectives.compression.states import State, find_state
from comm_collectives.memory import memory_view
from comm_utils import operations
from comm_utils.backend import Backend, Work
from comm_utils.reduce_op import ReduceOp

__all__ = ["all_gather", "all_reduce", "all_to_all", "on_tensors", "reduce_scatter"]


def _make_link(backend: Backend, compression: Compression, group: ProcessGroup | None, refusal: str = "") -> Link:
    assert compression.codec is not None
    return Link(backend, group, compression.codec, compression.describe_call(), refusal)


def _run(
    call: str,
    backend: Backend,
    group: ProcessGroup | None,
    counted: torch.Tensor,
    op: ReduceOp | None,
    async_op: bool,
    compression: Compression,
    wire_bytes: int,
    body: Callable[[Backend, ProcessGroup | None], None],
    result: Any,
    was_plain: Callable[[], bool] | None = None,
) -> Work | None:
    """Do ``body``, now or in the group's thread, and have it recorded as one call of the user's."""
    return composed.run(
        call,
        backend,
        group,
        counted,
        op,
        async_op,
        body,
        result,
        method=compression.describe_one_step(),
        wire_bytes=wire_bytes,
        was_plain=was_plain,
        what=f"the compression {compression!r}",
    )


def all_reduce(
    call: str,
    backend: Backend,
    tensor: torch.Tensor,
    op: ReduceOp,
    group: ProcessGroup | None,
    async_op: bool,
    compression: Compression,
) -> Work | None:
    """Reduce a dense ``tensor`` in place, in the order of its memory."""
    elements, average = memory_view(tensor), op is ReduceOp.AVG
    size = backend.get_world_size(group)
    if compression.codec is None:
        return _all_reduce_low_rank(call, backend, tensor, elements, op, group, async_op, compression)
    if between_hosts.suits(compression, backend, group, tensor):
        return between_hosts.all_reduce(call, backend, tensor, op, group, async_op, compression)
    sizing = _make_link(backend, compression, group)
    owned = sizing.slices(elements.numel())[sizing.rank]
    feedback, refusal = find_state(
        lambda members: compression.feedback(tensor, tensor.numel(), owned, average, members), backend, group
    )
    wire_bytes = sizing.all_reduce_bytes(elements.numel())

    def body(inner: Backend, used: ProcessGroup | None) -> None:
        if size > 1:
            pipeline.all_reduce(_make_link(inner, compression, used, refusal), elements, average, feedback)
        elif feedback is not None:
            _add_losses(elements, feedback)

    return _run(call, backend, group, tensor, op, async_op, compression, wire_bytes, body, tensor)


def _add_losses(elements: torch.Tensor, state: State) -> None:
    """Add what encodings have lost in a world with more ranks."""
    elements.add_(state.local)
    state.local.zero_()


def _all_reduce_low_rank(
    call: str,
    backend: Backend,
    tensor: torch.Tensor,
    elements: torch.Tensor,
    op: ReduceOp,
    group: ProcessGroup | None,
    async_op: bool,
    compression: Compression,
) -> Work | None:
    size = backend.get_world_size(group)
    state, refusal = find_state(
        lambda members: compression.low_rank(tensor, tensor.numel(), op is ReduceOp.AVG, members), backend, group
    )
    shape = low_rank.memory_shape(tensor)
    count = low_rank.factor_elements(shape, compression.rank) or tensor.numel()
    what = f"{_describe_low_rank('all_reduce', shape, tensor.dtype, op)} with {compression!r}"

    def body(inner: Backend, used: ProcessGroup | None) -> None:
        def reduce(part: torch.Tensor) -> None:
            reduction.all_reduce(inner, part, ReduceOp.SUM, used, False, call)

        if size > 1:
            Agreement(inner, used, what, refusal=refusal).check()
        assert state is not None
        if size > 1:
            with torch.autocast(tensor.device.type, enabled=False):  # which would multiply in 16 bits
                low_rank.all_reduce(reduce, shape, elements, op is ReduceOp.AVG, size, compression.rank, state)
        else:
            _add_losses(elements, state)

    wire_bytes = 2 * (size - 1) * 4 * count // size
    return _run(call, backend, group, tensor, op, async_op, compression, wire_bytes, body, tensor)


def _describe_low_rank(collective: str, shape: torch.Size, dtype: torch.dtype, op: ReduceOp) -> str:
    return f"{collective}{' (avg)' if op is ReduceOp.AVG else ''} of {'x'.join(map(str, shape))} {dtype}"


def reduce_scatter(
    call: str,
    backend: Backend,
    output: torch.Tensor,
    slices: Sequence[torch.Tensor],
    counted: torch.Tensor,
    op: ReduceOp,
    group: ProcessGroup | None,
    async_op: bool,
    compression: Compression,
    finish: Callable[[], None],
    place: torch.Tensor,
    shape: torch.Size,
) -> Work | None:
    """Reduce entry r of every rank's ``slices`` into ``output``, (n,), of rank r, and then ``finish``.

    Args:
        place: begins where the user's input does, of which ``slices`` may be copies.
        shape: of the elements of all slices, one after the other, for ``"powersgd"``.
    """
    if compression.codec is None:
        return _reduce_scatter_low_rank(
            call, backend, output, slices, counted, op, group, async_op, compression, finish, place, shape
        )
    if between_hosts.suits(compression, backend, group, output, *slices):
        return between_hosts.reduce_scatter(
            call, backend, output, slices, counted, op, group, async_op, compression, finish, place
        )
    count, average = sum(one.numel() for one in slices), op is ReduceOp.AVG
    feedback, refusal = find_state(
        lambda members: compression.feedback(place, count, 0, average, members), backend, group
    )
    sizing = _make_link(backend, compression, group)
    wire_bytes = sum(sizing.wire_bytes(one.numel()) for rank, one in enumerate(slices) if rank != sizing.rank)

    def body(inner: Backend, used: ProcessGroup | None) -> None:
        link = _make_link(inner, compression, used, refusal)
        if link.size > 1:
            pipeline.reduce_scatter(link, output, slices, average, feedback)
        else:
            output.copy_(slices[0])
            if feedback is not None:
                _add_losses(output, feedback)
        finish()

    return _run(call, backend, group, counted, op, async_op, compression, wire_bytes, body, output)


def _reduce_scatter_low_rank(
    call: str,
    backend: Backend,
    output: torch.Tensor,
    slices: Sequence[torch.Tensor],
    counted: torch.Tensor,
    op: ReduceOp,
    group: ProcessGroup | None,
    async_op: bool,
    compression: Compression,
    finish: Callable[[], None],
    place: torch.Tensor,
    shape: torch.Size,
) -> Work | None:
    size, rank, average = backend.get_world_size(group), backend.get_rank(group), op is ReduceOp.AVG
    counts = [one.numel() for one in slices]
    total = sum(counts)
    state, refusal = find_state(lambda members: compression.low_rank(place, total, average, members), backend, group)
    parts = "" if len(set(counts)) == 1 else f" in parts of {', '.join(map(str, counts))}"
    what = f"{_describe_low_rank('reduce_scatter', shape, output.dtype, op)}{parts} with {compression!r}"

    def body(inner: Backend, used: ProcessGroup | None) -> None:
        def reduce(part: torch.Tensor) -> None:
            reduction.all_reduce(inner, part, ReduceOp.SUM, used, False, call)

        def scatter(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
            reduction.reduce_scatter(inner, target, parts, ReduceOp.SUM, used, False)

        if size > 1:
            Agreement(inner, used, what, refusal=refusal).check()
        assert state is not None
        if size > 1:
            with torch.autocast(output.device.type, enabled=False):  # which would multiply in 16 bits
                low_rank.reduce_scatter(
                    reduce, scatter, shape, output, slices, rank, average, size, compression.rank, state
                )
        else:
            output.copy_(slices[0])
            _add_losses(output, state)
        finish()

    factors = low_rank.factor_elements(shape, compression.rank)
    wire_bytes = 2 * (size - 1) * 4 * factors // size if factors else 4 * (total - counts[rank])
    return _run(call, backend, group, counted, op, async_op, compression, wire_bytes, body, output)


def all_gather(
    call: str,
    backend: Backend,
    targets: Sequence[torch.Tensor],
    source: torch.Tensor,
    group: ProcessGroup | None,
    async_op: bool,
    compression: Compression,
    finish: Callable[[], None],
    result: Any,
) -> Work | None:
    """Overwrite ``targets[r]``, (n,), with ``source``, (n,), of rank r, and then ``finish``."""
    if between_hosts.suits(compression, backend, group, source, *targets):
        return between_hosts.all_gather(call, backend, targets, source, group, async_op, compression, finish, result)
    sizing = _make_link(backend, compression, group)
    wire_bytes = (sizing.size - 1) * sizing.wire_bytes(source.numel())

    def body(inner: Backend, used: ProcessGroup | None) -> None:
        link = _make_link(inner, compression, used)
        if link.size > 1:
            pipeline.all_gather(link, targets, source)
        else:
            targets[0].copy_(source)
        finish()

    return _run(call, backend, group, source, None, async_op, compression, wire_bytes, body, result)


def all_to_all(
    call: str,
    backend: Backend,
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    counted: torch.Tensor,
    group: ProcessGroup | None,
    async_op: bool,
    compression: Compression,
    finish: Callable[[], None],
    result: Any,
    plain: Callable[[Backend, ProcessGroup | None], object] | None = None,
) -> Work | None:
    """Overwrite ``targets[r]`` with the entry for this rank of the ``sources`` of rank r, and then ``finish``.

    Args:
        plain: does the same without compression, where no rank exchanges enough; None where that is known.
    """
    sizing = _make_link(backend, compression, group)
    wire_bytes = sum(sizing.wire_bytes(one.numel()) for rank, one in enumerate(sources) if rank != sizing.rank)

    was_plain = False

    def body(inner: Backend, used: ProcessGroup | None) -> None:
        nonlocal was_plain
        least_bytes = 0 if plain is None else compression.settled_min_size_bytes
        if not pipeline.all_to_all(_make_link(inner, compression, used), targets, sources, least_bytes, plain is None):
            assert plain is not None
            was_plain = True
            plain(inner, used)
        finish()

    return _run(call, backend, group, counted, None, async_op, compression, wire_bytes, body, result, lambda: was_plain)


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
    parts = torch.split(whole, length)
    if row.is_in_place:
        return all_reduce(operation, backend, whole, ReduceOp.SUM, group, False, compression)

    def finish() -> None:
        """Leave the result where it is."""

    if row.pattern.reduces:
        return reduce_scatter(
            operation, backend, part, parts, part, ReduceOp.SUM, group, False, compression, finish, whole, whole.shape
        )
    if row.pattern.input_is_part:
        return all_gather(operation, backend, parts, part, group, False, compression, finish, whole)
    targets = torch.split(torch.empty_like(whole), length)
    return all_to_all(operation, backend, targets, parts, whole, group, False, compression, finish, whole)
