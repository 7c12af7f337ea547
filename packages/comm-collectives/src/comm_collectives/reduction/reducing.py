"""Reductions over any backend, whatever it lacks.

All communication is started before these functions return; only local work is left for ``wait()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed import ProcessGroup

from comm_collectives.composed import ComposedCall
from comm_collectives.memory import as_bytes, concatenate, contiguous, contiguous_elements, memory_view
from comm_collectives.reduction import fixed_order
from comm_collectives.reduction.exchanging import exchange_parts
from comm_collectives.reduction.order import needed_order
from comm_collectives.work import deliver
from comm_utils.backend import Backend, Work
from comm_utils.flight_recorder.reduce_op import reduces_by
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support.passed_tensors import passing_as, passing_bytes
from comm_utils.torch_support.reduction_encoding import Encoding, encoding_for

__all__ = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"]


@reduces_by
def all_reduce(
    backend: Backend,
    tensor: torch.Tensor,
    op: ReduceOp,
    group: ProcessGroup | None,
    async_op: bool,
    call: str = "all_reduce",
) -> Work | None:
    """Reduce a dense ``tensor`` in place, in the order of its memory."""
    capabilities = backend.capabilities(group, tensor.device.type)
    encoding, W = encoding_for(call, op, tensor.dtype, capabilities), backend.get_world_size(group)
    order = needed_order(group, op, tensor.dtype, capabilities, W)
    if order is not None:
        composed = ComposedCall(call, backend, group, tensor, op, async_op, tensor)
        with passing_bytes([tensor]):
            return fixed_order.all_reduce(composed, memory_view(tensor), order.fold_of(op))
    # Profilers show the shape of what travels.
    elements = tensor.detach() if encoding.native and tensor.is_contiguous() else memory_view(tensor)
    wire = encoding.encode(elements)
    if encoding.native:
        with passing_as(tensor, wire):
            work = backend.all_reduce(wire, encoding.op, group, async_op)
        return deliver([work], encoding.decoder(wire, elements, W), tensor, async_op)
    parts = wire.new_empty(W * wire.numel())
    sent, received = (as_bytes(side, capabilities.dtypes) for side in (wire, parts))
    with passing_as(tensor, sent):
        work = backend.all_gather_into_tensor(received, sent, group, async_op)
    return deliver([work], encoding.folder(parts.view(W, wire.numel()), elements), tensor, async_op)


@reduces_by
def reduce(
    backend: Backend, tensor: torch.Tensor, group_dst: int, op: ReduceOp, group: ProcessGroup | None, async_op: bool
) -> Work | None:
    """Reduce into the dense ``tensor`` of ``group_dst``, in logical order; the others' stay as they are, bitwise."""
    capabilities = backend.capabilities(group, tensor.device.type)
    encoding, W = encoding_for("reduce", op, tensor.dtype, capabilities), backend.get_world_size(group)
    is_dst = backend.get_rank(group) == group_dst
    order = needed_order(group, op, tensor.dtype, capabilities, W)
    elements = contiguous(tensor) if encoding.native and order is None else contiguous_elements(tensor)
    is_own = elements.data_ptr() == tensor.data_ptr()  # else a copy
    if order is not None:
        back = _copied_back(None, elements, tensor, is_dst and not is_own)
        composed = ComposedCall("reduce", backend, group, tensor, op, async_op, tensor, root=(None, group_dst))
        with passing_bytes([tensor]):
            return fixed_order.reduce(composed, elements, order.fold_of(op), back)
    wire = encoding.encode(elements)
    if encoding.native:
        if not is_dst and is_own and encoding.shares and not capabilities.preserving_reduce:
            wire = wire.clone()
        with passing_as(tensor, wire):
            work = backend.reduce(wire, None, encoding.op, group, async_op, group_dst)
        finish = encoding.decoder(wire, elements, W) if is_dst else None
        return deliver([work], _copied_back(finish, elements, tensor, is_dst and not is_own), tensor, async_op)
    sent = as_bytes(wire, capabilities.dtypes)
    if not is_dst:
        with passing_as(tensor, sent):
            work = backend.gather(sent, None, None, group, async_op, group_dst)
        return deliver([work], None, tensor, async_op)
    parts = wire.new_empty(W, wire.numel())
    received = [as_bytes(part, capabilities.dtypes) for part in parts]
    with passing_as(tensor, sent):
        work = backend.gather(sent, received, None, group, async_op, group_dst)
    finish = encoding.folder(parts, elements)
    return deliver([work], _copied_back(finish, elements, tensor, not is_own), tensor, async_op)


@reduces_by
def reduce_scatter_tensor(
    backend: Backend,
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp,
    group: ProcessGroup | None,
    async_op: bool,
    call: str = "reduce_scatter_tensor",
) -> Work | None:
    """Reduce ``input``, (W*n,), and leave this rank's part in ``output``, (n,), both one-dimensional and contiguous."""
    capabilities = backend.capabilities(group, input.device.type)
    encoding, W = encoding_for(call, op, input.dtype, capabilities), backend.get_world_size(group)
    order = needed_order(group, op, input.dtype, capabilities, W)
    if order is not None:
        composed = ComposedCall(call, backend, group, input[: input.numel() // W], op, async_op, output)
        with passing_bytes([input]):
            return fixed_order.reduce_scatter(composed, input, [output.numel()] * W, order.fold_of(op))
    if not (encoding.native and "reduce_scatter_tensor" in capabilities.operations):
        return _exchange_and_fold(backend, output, input, [output.numel()] * W, encoding, group, async_op)
    wire_in = encoding.encode(input)
    wire_out = encoding.encode(output) if encoding.shares else wire_in.new_empty(wire_in.numel() // W)
    with passing_as(input, wire_in):
        work = backend.reduce_scatter_tensor(wire_out, wire_in, encoding.op, group, async_op)
    return deliver([work], encoding.decoder(wire_out, output, W), output, async_op)


@reduces_by
def reduce_scatter(
    backend: Backend,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    op: ReduceOp,
    group: ProcessGroup | None,
    async_op: bool,
) -> Work | None:
    """Reduce entry r of every rank's ``inputs`` into ``output``, (n,), of rank r; entries may differ in size."""
    sizes = [tensor.numel() for tensor in inputs]
    joined = concatenate([contiguous_elements(tensor) for tensor in inputs])
    if len(set(sizes)) == 1:
        return reduce_scatter_tensor(backend, output, joined, op, group, async_op, "reduce_scatter")
    capabilities = backend.capabilities(group, joined.device.type)
    encoding = encoding_for("reduce_scatter", op, joined.dtype, capabilities)
    order = needed_order(group, op, joined.dtype, capabilities, len(sizes))
    if order is not None:
        counted = joined[: joined.numel() // len(sizes)]  # the part of a rank, of the same size on every rank
        composed = ComposedCall("reduce_scatter", backend, group, counted, op, async_op, output)
        with passing_bytes([joined]):
            return fixed_order.reduce_scatter(composed, joined, sizes, order.fold_of(op))
    return _exchange_and_fold(backend, output, joined, sizes, encoding, group, async_op)


def _exchange_and_fold(
    backend: Backend,
    output: torch.Tensor,
    input: torch.Tensor,
    sizes: Sequence[int],
    encoding: Encoding,
    group: ProcessGroup | None,
    async_op: bool,
) -> Work | None:
    """Send part r, ``sizes[r]`` elements of ``input``, to rank r; reduce the parts received into ``output``."""
    capabilities = backend.capabilities(group, input.device.type)
    W = len(sizes)
    wire = encoding.encode(input)
    scale = wire.numel() // input.numel() if input.numel() else 1  # a complex number travels as two floats
    mine = output.numel() * scale
    parts = wire.new_empty(W * mine)
    sent, received = (as_bytes(side, capabilities.dtypes) for side in (wire, parts))
    unit = scale if sent is wire else scale * wire.element_size()
    with passing_as(input, sent):
        work = exchange_parts(backend, received, sent, [size * unit for size in sizes], group, async_op)
    return deliver([work], encoding.folder(parts.view(W, mine), output), output, async_op)


def _copied_back(
    finish: Callable[[], None] | None, elements: torch.Tensor, tensor: torch.Tensor, needed: bool
) -> Callable[[], None] | None:
    """``finish``, and then ``elements`` into the ``tensor`` that they were copied from, where that is ``needed``."""
    if not needed:
        return finish

    def finish_and_copy() -> None:
        if finish is not None:
            finish()
        tensor.detach().copy_(elements.view(tensor.shape))

    return finish_and_copy
